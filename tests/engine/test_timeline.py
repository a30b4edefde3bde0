"""What a turn's record says of its restore: when it read and when it computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.restoration.timeline import MAX_SPANS, NEAR_S, SpanKind, Timeline
from tests.engine.harness import HarnessFactory, random_ids

KINDS: tuple[SpanKind, ...] = ("read", "compute", "recompute")


def test_neighbours_are_one_span() -> None:
    """Layers of one part add up, and tokens of different parts."""
    line = Timeline()
    line.add("compute", 10.0, 10.1, 0, 64, 1)
    line.add("read", 10.05, 10.3, 0, 64, 3)
    line.add("compute", 10.1 + NEAR_S / 2, 10.2, 0, 64, 2)
    line.add("compute", 10.2, 10.4, 64, 32, 3)
    line.add("compute", 10.5, 10.6, 96, 16, 3)
    assert [
        (kind, round(start), round(end), tokens, layers)
        for kind, start, end, tokens, layers in line.spans(10.0)
    ] == [
        ("compute", 0, 400, 96, 3),
        ("read", 50, 300, 64, 3),
        ("compute", 500, 600, 16, 3),
    ]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(KINDS),
            st.floats(0, 1, allow_nan=False),
            st.floats(0, 0.1, allow_nan=False),
        ),
        max_size=300,
    )
)
def test_few_spans_that_cover_all_that_was_added(
    added: list[tuple[SpanKind, float, float]],
) -> None:
    line = Timeline()
    at = dict.fromkeys(KINDS, 0.0)
    times: list[tuple[str, float, float]] = []
    for i, (kind, pause, length) in enumerate(added):
        start = at[kind] + pause
        at[kind] = start + length
        times.append((kind, start, at[kind]))
        line.add(kind, start, at[kind], i, 1, 1)
    spans = line.spans(0.0)
    assert len(spans) <= MAX_SPANS
    assert [s[1] for s in spans] == sorted(s[1] for s in spans)
    assert sum(tokens for *_, tokens, _ in spans) == len(added)
    for name, start, end in times:
        assert any(
            k == name and low <= start * 1e3 + 1e-6 and end * 1e3 <= high + 1e-6
            for k, low, high, *_ in spans
        )


@pytest.mark.parametrize("method", ["hidden", "kv"])
def test_a_turn_tells_when_its_restore_read_and_computed(
    make_engine: HarnessFactory, tmp_path: Path, method: str
) -> None:
    history = random_ids(1000, 3)
    harness = make_engine(disk=tmp_path, checkpoint_method=method)
    first = harness.submit(history)
    harness.run()
    history += harness.ids(first)
    make_engine.close(harness)
    harness = make_engine(disk=tmp_path, checkpoint_method=method)
    request = harness.submit(random_ids(5, 4), history=history, computed=len(history) - 1)
    harness.run()
    stats = harness.done(request).stats
    restored = len(history) - 1
    for kind in ("read", "compute"):
        assert sum(s[3] for s in stats.restore_spans if s[0] == kind) == restored
    computing = sum(end - start for kind, start, end, *_ in stats.restore_spans if kind != "read")
    # spans that are close are one, and the pause between them is counted too
    assert 0 < computing <= stats.restore_compute_ms + 64 * NEAR_S * 1e3
    assert all(
        0 <= start <= end <= stats.restore_ms + 1 for _, start, end, *_ in stats.restore_spans
    )
    assert all(layers == 3 for kind, *_, layers in stats.restore_spans if kind == "compute")
