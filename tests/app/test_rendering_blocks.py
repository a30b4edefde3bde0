"""Markdown block by block: what a stream sends adds up to what a page shows."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from app.rendering import BlockRenderer, FinishedHtml, render_blocks, render_markdown, render_plain
from app.rendering.markdown import normalise, parse_blocks

PIECES = [
    "word", " ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "\r", "# ", "## ", "- ", "* ", "+ ",
    "1. ", "2) ", "> ", "```", "```python\n", "~~~", "---", "===", "***", "|", "| a | b |",
    "|---|:-:|", "**", "_", "`", "~~", "[a](http://b.c)", "![i](http://b.c)", "\\", "<b>", "&amp;",
    "[x]: http://y.z", "[x]", "<http://a.b>", "\x0b", "\u2028", "\0", "\U0001f600", "\u65e5",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


def without_marks(text: str) -> str:
    """The text without a last line that has no letter yet, and no number that goes on."""
    text = normalise(text)
    start = text.rfind("\n") + 1
    line = text[start:].strip(" \t")
    number = re.search(r"[0-9]+[.)]?$", line)
    marks = line[: number.start()] if number else line
    return text[:start] if not set(marks) - set(" \t>|:=#`~*+_-") else text


@given(texts, st.data())
@settings(max_examples=400, deadline=None)
@example("para\n#tag", None)
@example("para\n-", None)
@example("a\n| x |\n|---|\n| 1 |\nb\n\n    code\n\n\n    more\n\nend", None)
@example("- a\n\n\n  b\n- c\n* d\n\n2. e", None)
@example("one\r\n\r\ntwo\r\n# three\r\nfour\r\r\nfive", None)
def test_closed_and_open_add_up_to_the_whole(text: str, data: Any) -> None:
    renderer = BlockRenderer()
    closed: list[str] = []
    end = 0
    while end < len(text):
        step = 1 if data is None else data.draw(st.integers(1, 12))
        end = min(len(text), end + step)
        update = renderer.feed(text[:end])
        closed += update.closed
        whole = render_blocks(text[:end])
        assert whole[: len(closed)] == tuple(closed)
        assert update.open == "".join(render_blocks(without_marks(text[:end]))[len(closed) :])
        assert renderer.num_closed == len(closed)


def test_work_per_feed_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = 0

    def counting(text: str) -> Iterator[tuple[int, Any]]:
        nonlocal parsed
        parsed += len(text)
        return parse_blocks(text)

    monkeypatch.setattr("app.rendering.blocks.parse_blocks", counting)
    text = "A paragraph of some words.\n\n```python\nprint(1)\n```\n\n- a list\n\n" * 100
    renderer = BlockRenderer()
    work = []
    for end in range(4, len(text), 4):
        parsed = 0
        renderer.feed(text[:end])
        work.append(parsed)
    assert max(work) < 200
    assert max(work[-500:]) == max(work[:500])


def test_an_unclosed_fence_is_code_already() -> None:
    update = BlockRenderer().feed("Look:\n\n```python\nx = 1\n")
    assert update.closed == ("<p>Look:</p>\n",)
    assert '<span class="code-language">python</span>' in update.open
    assert '<span class="hl-n">x</span>' in update.open


@pytest.mark.parametrize(
    ("before", "marks", "after"),
    [
        ("- a point\n", "  -", " one below"),
        ("A line\n", "=", "= b"),
        ("A line\n\n", "#", "# a heading"),
        ("A line\n\n", "``", "`python\n"),
        ("1. one\n", "2", ". two"),
        ("A line\n\n", "| --", " | b |"),
    ],
)
def test_a_line_of_marks_waits_for_its_meaning(before: str, marks: str, after: str) -> None:
    renderer = BlockRenderer()
    first = renderer.feed(before)
    held = renderer.feed(before + marks)
    assert (held.closed, held.open) == ((), first.open)
    last = renderer.feed(before + marks + after)
    whole = render_markdown(before + marks + after)
    assert "".join((*first.closed, *last.closed)) + last.open == whole


def test_a_shorter_text_is_refused() -> None:
    renderer = BlockRenderer()
    renderer.feed("one\n\ntwo\n\nthree")
    with pytest.raises(ValueError, match="3 characters, 5 are closed"):
        renderer.feed("one")


def test_code_is_byte_exact() -> None:
    code = "\n\n  two spaces\n\ttab\n\n\nend  \n"
    html = render_markdown(f"```\n{code}```\n")
    assert f"<pre><code>{code}</code></pre>" in html


@pytest.mark.parametrize("language", ["python", "js", "c++", "html", "no-such-language", "x" * 99])
def test_highlighting_changes_no_character(language: str) -> None:
    code = '\n\n<b class="x">&amp;\n  if a < b: "s"\n\n'
    html = render_markdown(f"```{language}\n{code}```")
    inner = html.split("<code>")[1].split("</code>")[0]
    assert _text(inner) == code


def _text(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", html))


def test_very_long_code_is_not_highlighted_but_whole() -> None:
    code = "x = 1\n" * 8000
    assert code in render_markdown(f"```python\n{code}```")


@pytest.mark.parametrize(
    "text",
    ["# One\n\ntwo *three* **four**\n", "- a\n- b\n  - c\n", "1. a\n\n   b\n", "> q\n> r\n",
     "a  \nb\n", "~~gone~~\n", "\\*not\\*\n", "two\n===\n"],
)  # fmt: skip
def test_it_is_commonmark(text: str) -> None:
    """Same as the plain library where no element of ours is in play."""
    expected = MarkdownIt("commonmark").enable("strikethrough").render(text)
    assert render_markdown(text) == expected.replace(" />", ">")


def test_tables_have_classes_for_alignment_and_no_style() -> None:
    html = render_markdown("| a | b | c |\n|:--|:-:|--:|\n| 1 | 2 | 3 |\n")
    assert '<td class="align-center">2</td>' in html
    assert "style" not in html


def test_links_open_apart() -> None:
    html = render_markdown("[x](https://example.org/a?b=c&d=e)")
    assert 'href="https://example.org/a?b=c&amp;d=e"' in html
    assert 'target="_blank"' in html
    assert 'rel="noopener noreferrer nofollow"' in html


def test_an_image_is_its_text() -> None:
    assert render_markdown("![a *b*](http://x.y/z.png)") == (
        '<p><span class="image-text">a b</span></p>\n'
    )


def test_a_later_definition_changes_nothing_sent_before() -> None:
    renderer = BlockRenderer()
    first = renderer.feed("See [a].\n\nMore.\n").closed
    renderer.feed("See [a].\n\nMore.\n\n[a]: http://b.c\n")
    assert render_blocks("See [a].\n\nMore.\n\n[a]: http://b.c\n")[0] == first[0]


def test_plain_text_keeps_its_white_space() -> None:
    assert render_plain("  a\n\n\tb <i> & \0") == "  a\n\n\tb &lt;i&gt; &amp; \ufffd"


def test_finished_html_is_rendered_once_per_version(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counting(text: str) -> str:
        calls.append(text)
        return render_markdown(text)

    monkeypatch.setattr("app.rendering.finished.render_markdown", counting)
    cache = FinishedHtml()
    assert cache.html("*a*") == cache.html("*a*") == "<p><em>a</em></p>\n"
    assert calls == ["*a*"]
    monkeypatch.setattr("app.rendering.finished.RENDERER_VERSION", "next")
    cache.html("*a*")
    assert calls == ["*a*", "*a*"]


def test_finished_html_stays_within_its_budget() -> None:
    cache = FinishedHtml(max_bytes=60)
    for text in ("one", "two", "three", "one"):
        cache.html(text)
    assert len(cache) == 3
    assert cache.html("x" * 200) == f"<p>{'x' * 200}</p>\n"
    assert len(cache) == 0


def test_the_style_sheet_is_the_generated_one() -> None:
    root = Path(__file__).parents[2]
    made = subprocess.run(
        [sys.executable, "-c", "from app.rendering.highlighting import style_sheet;"
         "print(style_sheet(), end='')"],
        cwd=root, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert root.joinpath("app/static/highlight.css").read_text() == made.stdout
