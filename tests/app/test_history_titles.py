"""The title that a chat gets from its first message."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.message_text import TITLE_CHARS, UNTITLED, clean_title, title_of


@pytest.mark.parametrize(
    ("text", "title"),
    [
        (
            "Hi. How do I restore a chat after a restart? It was lost.",
            "Hi. How do I restore a chat after a restart?",
        ),
        ("A sentence of its own here. And another.", "A sentence of its own here"),
        (
            "# Heading\n\nSome **bold** text with `code` and [a link](http://x). More.",
            "Heading Some bold text with code and a link",
        ),
        ("![a picture](x.png) and _stress_ on ~~this~~", "a picture and stress on this"),
        ("```python\nprint(1)\n```\nWhat does this do?", "What does this do?"),
        ("~~~\nfenced\n~~~\n\n> quoted\n\nreply here", "quoted reply here"),
        ("```python\nprint(1)\n```", "print(1)"),
        ("```\nnever closed", "never closed"),
        ("- [ ] one item\n- another", "one item another"),
        ("1. first thing\n2) second thing", "first thing second thing"),
        ("---\nbelow a rule", "below a rule"),
        ("snake_case_name and 2 * 3 * 4 = 24", "snake_case_name and 2 * 3 * 4 = 24"),
        ("C++ or C#?", "C++ or C#?"),
        ("e.g. this is one sentence. Yes", "e.g. this is one sentence"),
        ("日本語の文章です。これは二つ目の文です。", "日本語の文章です"),
        ("请问重启之后如何恢复聊天记录\uff1f谢谢", "请问重启之后如何恢复聊天记录\uff1f"),
        ("字" * 100, "字" * (TITLE_CHARS // 2) + "…"),
        ("Look at https://example.com/" + "x" * 80, None),
        ("***", UNTITLED),
        (" \n ", UNTITLED),
    ],
)
def test_titles(text: str, title: str | None) -> None:
    found = title_of(text)
    if title is None:
        assert found.startswith("Look at https://example.com/x")
        assert found.endswith("…")
    else:
        assert found == title


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_any_text_gives_a_title_that_can_be_kept(text: str) -> None:
    title = title_of(text)
    assert 1 <= len(title) <= TITLE_CHARS + 1
    assert clean_title(title)


@pytest.mark.parametrize("piece", ["```", "*a ", "[", "**", "> ", "a. ", "_a", "`", "~~", "- "])
def test_no_text_takes_long(piece: str) -> None:
    begun = time.perf_counter()
    title_of(piece * (100_000 // len(piece)))
    assert time.perf_counter() - begun < 0.5
