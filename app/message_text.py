"""What a posted text may be, and the title that a chat gets from its first one."""

from __future__ import annotations

import re
import unicodedata

from app.faults import InvalidField

TITLE_CHARS = 60
MAX_TITLE_CHARS = 120
UNTITLED = "Untitled"
MIN_TITLE_CHARS = 16  # of the first sentences, before another one is taken along
TITLE_LOOKS_AT = 4000
_FENCED = re.compile(r"^ {0,3}(```+|~~~+).*?(?:^ {0,3}\1[`~]*[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_RULE = re.compile(r"\s*(?:[-*_=]\s*){3,}|\s*(?:```|~~~)\S*\s*")
_LINE_MARKS = re.compile(r"^\s*(?:>\s*)*(?:#{1,6}\s+|[-*+]\s+|\d{1,3}[.)]\s+)?(?:\[[ xX]\]\s+)?")
_INLINE_MARKS = (
    re.compile(r"!?\[([^\[\]]*)\]\([^()]*\)"),  # links and images
    re.compile(r"`+([^`]+)`+"),
    re.compile(r"(?<!\w)(?:\*\*\*|\*\*|\*)(?=\S)([^*]+?)(?<=\S)\*+(?!\w)"),
    re.compile(r"(?<!\w)_{1,3}(?=\S)([^_]+?)(?<=\S)_{1,3}(?!\w)"),
    re.compile(r"~~(?=\S)([^~]+?)~~"),
)
_SENTENCE_END = re.compile(r"[.!?…]+[\"')\]]*(?=\s|$)|[\u3002\uff01\uff1f]+")
_SURROGATE = re.compile("[\ud800-\udfff]")


def clean_text(raw: str, max_chars: int) -> str:
    """The text as it is stored: CRLF (what forms send) becomes LF, nothing else changes.

    Raises InvalidField for an empty or too long text, NUL, and lone surrogates.
    """
    text = raw.replace("\r\n", "\n")
    if not text.strip():
        raise InvalidField("text", "The message is empty: write something first.")
    _check(text, "text", "message")
    if len(text) > max_chars:
        raise InvalidField(
            "text", f"The message has {len(text):,} characters; up to {max_chars:,} can be sent."
        )
    return text


def clean_title(raw: str) -> str:
    """A title on one line, with something to see. Raises InvalidField."""
    title = " ".join(raw.split())
    _check(title, "title", "title")
    if not _is_visible(title):
        raise InvalidField("title", "The title is empty: write at least one character.")
    if len(title) > MAX_TITLE_CHARS:
        raise InvalidField(
            "title", f"The title has {len(title)} characters; it can have up to {MAX_TITLE_CHARS}."
        )
    return title


def title_of(text: str) -> str:
    """The first words of a text that has some: about a sentence, on one line, without Markdown.

    Code is passed over unless there is nothing else.
    """
    text = text[:TITLE_LOOKS_AT]
    prose = _FENCED.sub("\n", text)
    for candidate in (prose, text):
        words = " ".join(_plain_line(line) for line in candidate.splitlines())
        words = _first_sentences(" ".join(words.split()))
        if _is_visible(words):
            return _shortened(words)
    return UNTITLED


def _plain_line(line: str) -> str:
    """A line without the marks that Markdown would take away."""
    if _RULE.fullmatch(line):
        return ""
    line = _LINE_MARKS.sub("", line)
    for marks in _INLINE_MARKS:
        line = marks.sub(r"\1", line)
    return line


def _first_sentences(words: str) -> str:
    """As many sentences as say something: a greeting alone does not."""
    for end in _SENTENCE_END.finditer(words):
        if _width(words[: end.start()]) >= MIN_TITLE_CHARS:
            # A full stop says nothing at the end of a title; a question mark does.
            return words[: end.end()].rstrip().rstrip(".\u3002")
    return words


def _shortened(words: str) -> str:
    if _width(words) <= TITLE_CHARS:
        return words
    cut = words
    while _width(cut) > TITLE_CHARS:
        cut = cut[: len(cut) - (_width(cut) - TITLE_CHARS + 1) // 2]  # each is at most two wide
    at_word = cut.rpartition(" ")[0] if words[len(cut)] != " " else cut
    if _width(at_word) < TITLE_CHARS // 2:  # one long word, or a script without spaces
        at_word = cut
    return at_word.rstrip(" ,;:-\u3001") + "…"


def _width(text: str) -> int:
    """How wide a text is, in letters: those of Chinese, Japanese and Korean are two wide."""
    return len(text) + sum(unicodedata.east_asian_width(char) in "WF" for char in text)


def _is_visible(text: str) -> bool:
    """Tell whether anything is neither white space nor a format or control character."""
    return any(unicodedata.category(char)[0] not in "CZ" for char in text)


def _check(text: str, field: str, name: str) -> None:
    at = text.find("\0")
    code = 0
    if at < 0:
        found = _SURROGATE.search(text)
        if found is None:
            return
        at, code = found.start(), ord(found[0])
    raise InvalidField(
        field, f"The {name} holds U+{code:04X} at character {at + 1:,}, which no text can have."
    )
