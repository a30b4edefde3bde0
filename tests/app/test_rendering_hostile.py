"""No text of a person or a model becomes anything but inert, allowed HTML.

The judge is Python's own HTML parser with an allow-list of its own, not the sanitiser.
"""

from __future__ import annotations

import json
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.rendering import BlockRenderer, render_markdown, render_plain
from app.rendering.sanitiser import sanitise

PAYLOADS: list[str] = json.loads(
    Path(__file__).parents[1].joinpath("hostile_payloads.json").read_text()
)
INERT = {
    "blockquote", "br", "code", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li",
    "ol", "p", "pre", "s", "span", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
}  # fmt: skip
CLASSED = {"code", "div", "pre", "span", "td", "th"}
OWN_CLASSES = {
    "code", "code-language", "table", "image-text", "align-left", "align-right", "align-center",
}  # fmt: skip


class Judge(HTMLParser):
    """Collects whatever a browser could act on, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.faults: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = {name: value or "" for name, value in attrs}
        if tag == "a":
            href = given.pop("href", "https://none")
            if not href.lower().startswith(("http://", "https://", "mailto:")):
                self.faults.append(f"link to {href!r}")
            if given.pop("rel", "") != "noopener noreferrer nofollow":
                self.faults.append("link without rel")
            if given.pop("target", "") != "_blank":
                self.faults.append("link into this window")
            given.pop("title", None)
        elif tag not in INERT:
            self.faults.append(f"element {tag!r}")
        if tag in CLASSED:
            for name in given.pop("class", "code").split():
                if name not in OWN_CLASSES and not name.startswith("hl-"):
                    self.faults.append(f"class {name!r}")
        if tag == "ol" and given.get("start", "").isdecimal():
            given.pop("start")
        self.faults += [f"attribute {name!r} of {tag}" for name in given]

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.faults.append(f"comment {data!r}")

    def handle_decl(self, decl: str) -> None:
        self.faults.append(f"declaration {decl!r}")

    def handle_pi(self, data: str) -> None:
        self.faults.append(f"instruction {data!r}")

    def unknown_decl(self, data: str) -> None:
        self.faults.append(f"section {data!r}")


def test_there_are_many_payloads() -> None:
    assert len(set(PAYLOADS)) == len(PAYLOADS) >= 60


@pytest.mark.parametrize("raw", ["<img src=x>", "<p id=a>", '<a href="/x">', "<hx-partial>"])
def test_the_judge_can_fail(raw: str) -> None:
    assert Judge(raw).faults


@pytest.mark.parametrize("payload", PAYLOADS)
def test_an_answer_with_it_is_inert(payload: str) -> None:
    assert Judge(render_markdown(payload)).faults == []


@pytest.mark.parametrize("payload", PAYLOADS)
def test_it_is_inert_at_every_length_of_a_growing_answer(payload: str) -> None:
    blocks = BlockRenderer()
    for end in range(1, len(payload) + 1):
        update = blocks.feed(payload[:end])
        for html in (*update.closed, update.open):
            assert Judge(html).faults == [], payload[:end]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_message_with_it_is_plain_text(payload: str) -> None:
    judge = Judge(render_plain(payload))
    assert judge.tags == []
    assert judge.text == payload.replace("\0", "\ufffd")


@pytest.mark.parametrize("payload", PAYLOADS)
def test_the_sanitiser_alone_makes_it_inert(payload: str) -> None:
    """The second line of defence, as if the markdown renderer had let raw HTML through."""
    assert Judge(sanitise(payload)).faults == []


@given(
    st.lists(st.sampled_from(PAYLOADS), min_size=2, max_size=4), st.sampled_from(["", " ", "\n"])
)
@settings(max_examples=60, deadline=None)
def test_payloads_joined_are_inert(parts: list[str], between: str) -> None:
    assert Judge(render_markdown(between.join(parts))).faults == []


def test_raw_html_is_shown_as_text() -> None:
    html = render_markdown("a <b>bold</b> <img src=x onerror=alert(1)>")
    assert Judge(html).text.strip() == "a <b>bold</b> <img src=x onerror=alert(1)>"
    assert Judge(html).tags == ["p"]


@pytest.mark.parametrize(
    "text",
    ["[" * 4000, "*" * 4000, "`" * 4001, "> " * 2000, "- " * 2000, "![" * 2000, "<" * 4000,
     "|a" * 2000 + "\n" + "|-" * 2000, "[a](" * 2000, "_a*" * 1500, "~~a" * 1500, "\\" * 4000,
     "&" * 4000, "```\n" * 2000, "1. " * 1500, "[](" + "(" * 4000],
    ids=lambda text: text[:6],
)  # fmt: skip
def test_no_text_takes_long(text: str) -> None:
    began = time.process_time()
    render_markdown(text)
    assert time.process_time() - began < 2.0
