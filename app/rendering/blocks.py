"""Markdown of a text that grows: blocks that are final, and the one still open."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice

from app.rendering.markdown import normalise, parse_blocks, render_tokens

# A CR at the very end may still become CRLF.
_COMPLETE_LINE_END = re.compile(r"\r\n|\r(?=.)|\n", re.DOTALL)
# A last line of which only marks are here: a "-" below a paragraph makes it a heading, until it
# becomes the "- a" of a list; "#" is a larger heading than "##" will be.
_MARKS_ONLY = re.compile(r"^[ \t>|:=#`~*+_-]*(?:[0-9]+[.)]?)?[ \t]*\Z", re.MULTILINE)


@dataclass(frozen=True)
class BlockUpdate:
    """What one `feed` brought: blocks closed since the last one, and the open rest."""

    closed: tuple[str, ...]  # safe HTML, final
    open: str  # safe HTML of what is after the closed blocks; "" when there is nothing


class BlockRenderer:
    """Owns where the open part of one growing text begins; one caller at a time.

    All closed blocks so far, followed by the open part, equal `render_markdown` of the text up to
    a last line of nothing but marks, which waits for what makes its meaning known.
    The work of a `feed` depends on the length of the open part, not on that of the text.
    """

    def __init__(self) -> None:
        self._open_from = 0  # characters of the text that are in closed blocks
        self._parsed_to = 0  # characters in complete lines at the last look for closed blocks
        self._num_closed = 0

    @property
    def num_closed(self) -> int:
        """Number of blocks closed so far."""
        return self._num_closed

    def feed(self, full_text: str) -> BlockUpdate:
        """Render what changed. `full_text` must extend the text of the previous call.

        Raises `ValueError` when it is shorter than what was already closed.
        """
        if len(full_text) < self._open_from:
            raise ValueError(
                f"the text has {len(full_text)} characters, {self._open_from} are closed already"
            )
        closed = self._close_blocks(full_text)
        self._num_closed += len(closed)
        rest = _MARKS_ONLY.sub("", normalise(full_text[self._open_from :]))
        opened = "".join(render_tokens(tokens) for _, tokens in parse_blocks(rest))
        return BlockUpdate(closed=closed, open=opened)

    def _close_blocks(self, full_text: str) -> tuple[str, ...]:
        # Only complete lines decide: "para\n#" has a heading until it becomes "para\n#tag". What
        # they make of all blocks but the last is final, since CommonMark is read line by line.
        rest = full_text[self._open_from :]
        line_ends = [match.end() for match in _COMPLETE_LINE_END.finditer(rest)]
        complete = line_ends[-1] if line_ends else 0
        if self._open_from + complete == self._parsed_to:
            return ()
        self._parsed_to = self._open_from + complete
        blocks = list(parse_blocks(normalise(rest[:complete])))
        if len(blocks) < 2:
            return ()
        last_block_line, _ = blocks[-1]
        self._open_from += line_ends[last_block_line - 1]
        return tuple(render_tokens(tokens) for _, tokens in islice(blocks, len(blocks) - 1))
