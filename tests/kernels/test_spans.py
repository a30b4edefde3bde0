"""The metadata of the attention kernels says what was asked for, and refuses what cannot be."""

from __future__ import annotations

import pytest

from kernels.spans import UNMASKED, Spans


def test_segments_and_causal_bases() -> None:
    spans = Spans.build(
        [(1, 3, [([7, 8], 100), ([2, 3, 4], 1)], True), (3, 9, [([5], 0), ([6], 64)], False)], 2
    )
    assert spans.rows.tolist() == [[1, 3, 98, 2], [3, 9, UNMASKED, 2]]
    assert spans.segments.tolist() == [[[0, 100], [2, 1]], [[3, 64], [0, 0]]]
    assert spans.pages.tolist() == [7, 8, 2, 6]
    assert spans.num_keys.tolist() == [101, 64]


def test_groups_cover_every_row_of_every_level() -> None:
    spans = Spans.groups([[(1, 3, [4], 60), (3, 5, [5, 6], 65)], [], [(0, 6, [9], 1)]], 6)
    assert spans.rows.tolist() == [
        [0, 1, UNMASKED, 1],
        [1, 3, UNMASKED, 1],
        [3, 5, UNMASKED, 1],
        [5, 6, UNMASKED, 1],
        [0, 6, UNMASKED, 2],
        [0, 6, UNMASKED, 3],
    ]
    assert spans.num_keys.tolist() == [0, 60, 65, 0, 0, 1]
    pages = [spans.pages[at] for (at, _), *_ in spans.segments[[1, 2, 5]].tolist()]
    assert pages == [4, 5, 9]


def test_no_levels_are_no_spans() -> None:
    assert Spans.groups([], 5).rows.shape == (0, 4)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="65 tokens do not fit in 1 pages"):
        Spans.build([(0, 1, [([3], 65)], False)])
    with pytest.raises(ValueError, match=r"rows \[1, 3\) do not follow row 2"):
        Spans.build([(0, 2, [], False), (1, 3, [], False)])
    with pytest.raises(ValueError, match=r"rows \[2, 2\)"):
        Spans.build([(2, 2, [], False)])
    with pytest.raises(ValueError, match="2 keys are fewer than the 3 query rows"):
        Spans.build([(0, 3, [([1], 2)], True)])
    with pytest.raises(ValueError, match="rows up to 5 are beyond the 4"):
        Spans.groups([[(0, 5, [3], 5)]], 4)
