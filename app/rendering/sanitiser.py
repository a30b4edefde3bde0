"""The allow-list that every piece of rendered HTML passes, whatever produced it."""

from __future__ import annotations

import re

import nh3

ALLOWED_SCHEMES = frozenset({"http", "https", "mailto"})
ALLOWED_TAGS = frozenset(
    [
        "a",
        "blockquote",
        "br",
        "code",
        "div",
        "em",
        "h1",
        "h2",
        "h3",
        "h4",
        "h5",
        "h6",
        "hr",
        "li",
        "ol",
        "p",
        "pre",
        "s",
        "span",
        "strong",
        "table",
        "tbody",
        "td",
        "th",
        "thead",
        "tr",
        "ul",
    ]
)
# Elements whose text is no prose: it goes with them.
_DROPPED_WITH_CONTENT = frozenset(
    [
        "script",
        "style",
        "template",
        "iframe",
        "noscript",
        "noembed",
        "noframes",
        "object",
        "embed",
        "svg",
        "math",
        "textarea",
        "title",
        "xmp",
        "plaintext",
        "select",
        "head",
    ]
)
_ALLOWED_ATTRIBUTES = {
    "a": {"href", "title"},
    "code": {"class"},
    "div": {"class"},
    "pre": {"class"},
    "span": {"class"},
    "th": {"class"},
    "td": {"class"},
    "ol": {"start"},
}
_CLASSES = re.compile(
    r"hl-[a-z0-9]{1,4}(?: hl-[a-z0-9]{1,4})*|code|code-language|table|image-text"
    r"|align-(?:left|right|center)"
)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*):", re.IGNORECASE)


def is_allowed_url(url: str) -> bool:
    """Tell whether a link may lead there: absolute, http, https or mailto."""
    scheme = _SCHEME.match(url)
    return scheme is not None and scheme[1].lower() in ALLOWED_SCHEMES


def _filter_attribute(tag: str, attribute: str, value: str) -> str | None:
    if attribute == "class":
        return value if _CLASSES.fullmatch(value) else None
    if attribute == "href":
        return value if is_allowed_url(value) else None
    if attribute == "start":
        return value if value.isascii() and value.isdecimal() else None
    return value


# Made once: to build it costs as much as to clean a block.
_cleaner = nh3.Cleaner(
    tags=set(ALLOWED_TAGS),
    clean_content_tags=set(_DROPPED_WITH_CONTENT),
    attributes=_ALLOWED_ATTRIBUTES,
    attribute_filter=_filter_attribute,
    link_rel="noopener noreferrer nofollow",
    set_tag_attribute_values={"a": {"target": "_blank"}},
    url_schemes=set(ALLOWED_SCHEMES),
    url_relative="deny",
)


def sanitise(html: str) -> str:
    """Return `html` with nothing but allowed elements, attributes, classes and links.

    No id, data-*, hx-*, style or event attribute, no image, form, frame or template survives;
    every link opens apart, without referrer or opener.
    """
    return _cleaner.clean(html)
