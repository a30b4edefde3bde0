"""How the engine behaves: limits, cancel, eviction, warm-up, faults of the store."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.messages import Cancel, Failed, Forget, Forgotten, GetStats, Stats, Warm
from tests.engine.harness import Harness, HarnessFactory, Oracle, random_ids

PREFIX = random_ids(100, 1)


def free_pages(harness: Harness) -> int:
    return harness.engine.scheduler.pool.num_free


def stats(harness: Harness) -> Stats:
    harness.engine.handle(GetStats(call_id=1))
    last = harness.events[-1]
    assert isinstance(last, Stats)
    return last


def test_a_full_context_is_refused_with_the_counts(make_engine: HarnessFactory) -> None:
    harness = make_engine(max_context=200)
    refused = harness.submit(random_ids(101, 2), prefix=PREFIX)
    assert harness.failed(refused).kind == "context_overflow"
    assert "201 tokens" in harness.failed(refused).reason
    assert "200" in harness.failed(refused).reason
    fits = harness.submit(random_ids(95, 2), prefix=PREFIX, max_tokens=50)
    harness.run()
    assert harness.done(fits).finish == "length"
    assert len(harness.ids(fits)) == 5  # up to the end of the context, not beyond


def test_a_prefix_may_fill_half_of_the_context(make_engine: HarnessFactory) -> None:
    harness = make_engine(max_context=150)
    refused = harness.submit([5], prefix=PREFIX)
    assert "half of the context" in harness.failed(refused).reason


def test_the_queue_is_bounded(make_engine: HarnessFactory) -> None:
    harness = make_engine(max_batch=1, max_queue=1)
    first = harness.submit(random_ids(5, 1), chat="a")
    harness.step()
    second = harness.submit(random_ids(5, 2), chat="b")
    rest = [harness.submit(random_ids(5, 3), chat=f"c{i}") for i in range(4)]
    assert all(harness.failed(r).kind == "queue_full" for r in rest)
    harness.run()
    assert harness.done(first).finish == harness.done(second).finish == "length"
    assert harness.done(second).stats.queue_ms > 0


def test_a_burst_is_taken_up_to_batch_and_queue_together(make_engine: HarnessFactory) -> None:
    """Posted before the next step, all of them still wait; the places in the batch count too."""
    harness = make_engine(max_batch=3, max_queue=0)
    burst = [harness.submit(random_ids(5, i), chat=f"c{i}") for i in range(5)]
    assert [harness.failed(r).kind for r in burst[3:]] == ["queue_full"] * 2
    harness.run()
    assert [harness.done(r).finish for r in burst[:3]] == ["length"] * 3


def test_a_turn_that_never_began_has_no_first_token(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    request = harness.submit(random_ids(5, 1))
    harness.engine.handle(Cancel(request_id=request))
    assert harness.done(request).stats.ttft_ms is None
    assert harness.done(request).stats.tokens_out == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_cancel_gives_pages_back_at_once(make_engine: HarnessFactory, steps: int) -> None:
    harness = make_engine(prefill_chunk=64)
    whole = free_pages(harness)
    request = harness.submit(random_ids(150, 4), prefix=PREFIX, max_tokens=100)
    for _ in range(steps):
        harness.step()
    harness.engine.handle(Cancel(request_id=request))
    done = harness.done(request)
    assert done.finish == "cancelled"
    assert done.stats.tokens_out == len(harness.ids(request))
    harness.run()
    harness.engine.scheduler.resident.evict_older_than(float("inf"))
    harness.engine.scheduler.check()
    while harness.engine.scheduler.resident.evict_one():
        pass
    assert free_pages(harness) == whole


def test_cancelling_a_waiting_request_means_that_it_never_runs(make_engine: HarnessFactory) -> None:
    harness = make_engine(max_batch=1)
    harness.submit(random_ids(5, 1), chat="a")
    harness.step()
    waiting = harness.submit(random_ids(5, 2), chat="b")
    harness.engine.handle(Cancel(request_id=waiting))
    harness.run()
    assert harness.ids(waiting) == []
    assert harness.done(waiting).stats.tokens_out == 0


def test_a_cancelled_chat_goes_on_from_what_it_has(
    make_engine: HarnessFactory, oracle: Oracle
) -> None:
    harness = make_engine()
    new = random_ids(30, 6)
    request = harness.submit(new, prefix=PREFIX, max_tokens=100)
    while len(harness.ids(request)) < 4:
        harness.step()
    harness.engine.handle(Cancel(request_id=request))
    history = new + harness.ids(request)
    more = random_ids(7, 7)
    again = harness.submit(more, prefix=PREFIX, history=history, computed=len(history) - 1)
    harness.run()
    assert harness.done(again).stats.resident_tokens == len(history) - 1
    assert harness.ids(again) == oracle.greedy(PREFIX + history + more, 12)


def test_stop_strings_end_an_answer_and_are_not_shown(make_engine: HarnessFactory) -> None:
    harness = make_engine()
    plain = harness.submit(random_ids(20, 8), chat="a", max_tokens=30)
    harness.run()
    text = harness.text(plain)
    assert harness.engine.tokenizer.decode(harness.ids(plain)) == text
    stop = text[5:8]
    stopped = harness.submit(random_ids(20, 8), chat="b", max_tokens=30, stop=(stop,))
    harness.run()
    assert harness.done(stopped).finish == "stop"
    assert harness.text(stopped) == text[: text.index(stop)]
    assert harness.ids(stopped) == harness.ids(plain)[: len(harness.ids(stopped))]


def test_idle_chats_are_evicted(make_engine: HarnessFactory, tmp_path: Path) -> None:
    harness = make_engine(disk=tmp_path, idle_evict_s=0.0)
    request = harness.submit(random_ids(100, 9), prefix=PREFIX)
    harness.run()
    assert harness.store is not None
    assert harness.store.flush(10.0)
    harness.engine.idle_tick()
    assert stats(harness).stats.resident_chats == 0
    assert stats(harness).stats.evictions >= 1
    history = random_ids(100, 9) + harness.ids(request)
    again = harness.submit([9, 9], prefix=PREFIX, history=history, computed=len(history) - 1)
    harness.run()
    assert harness.done(again).stats.restored_tokens == len(history) - 1


def test_warm_up_makes_the_next_turn_resident(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path
) -> None:
    harness = make_engine(disk=tmp_path)
    first = harness.submit(random_ids(200, 10), prefix=PREFIX)
    harness.run()
    history = random_ids(200, 10) + harness.ids(first)
    make_engine.close(harness)
    harness = make_engine(disk=tmp_path)
    harness.engine.handle(Warm(chat_id="a", prefix_ids=PREFIX, history_ids=history))
    harness.run()
    request = harness.submit([7, 8, 9], prefix=PREFIX, history=history, computed=len(history) - 1)
    harness.run()
    record = harness.done(request).stats
    assert record.resident_tokens >= len(history) - 1
    assert (record.restored_tokens, record.recomputed_tokens) == (0, 0)
    assert harness.ids(request) == oracle.greedy([*PREFIX, *history, 7, 8, 9], 12)


def test_a_chat_is_warmed_where_only_its_own_tokens_have_room(
    make_engine: HarnessFactory, tmp_path: Path
) -> None:
    """The prefix is in memory already and needs none."""
    pages = {"kv_memory_bytes": 7 * 3 * 2 * 2 * 64 * 64 * 4}
    harness = make_engine(disk=tmp_path, **pages)
    first = harness.submit(random_ids(200, 10), prefix=PREFIX)
    harness.run()
    history = random_ids(200, 10) + harness.ids(first)
    scheduler = harness.engine.scheduler
    assert harness.store is not None
    assert harness.store.flush(10.0)
    scheduler.resident.evict("a")
    assert (scheduler.pool.num_pages, scheduler.pool.num_free) == (7, 5)
    harness.engine.handle(Warm(chat_id="a", prefix_ids=PREFIX, history_ids=history))
    harness.run()
    assert scheduler.resident.idle_chats() == ["a"]
    scheduler.resident.evict("a")
    more = [*history, *random_ids(140, 11)]  # six pages
    harness.engine.handle(Warm(chat_id="a", prefix_ids=PREFIX, history_ids=more))
    harness.step()
    assert scheduler.resident.idle_chats() == []


def test_a_message_during_the_warm_up_takes_it_over(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path
) -> None:
    harness = make_engine(disk=tmp_path)
    first = harness.submit(random_ids(200, 10), prefix=PREFIX)
    harness.run()
    history = random_ids(200, 10) + harness.ids(first)
    make_engine.close(harness)
    harness = make_engine(disk=tmp_path)
    harness.engine.handle(Warm(chat_id="a", prefix_ids=PREFIX, history_ids=history))
    request = harness.submit([7, 8, 9], prefix=PREFIX, history=history, computed=len(history) - 1)
    harness.run()
    record = harness.done(request).stats
    assert record.restored_tokens + record.resident_tokens == len(history) - 1
    assert harness.ids(request) == oracle.greedy([*PREFIX, *history, 7, 8, 9], 12)


@pytest.mark.parametrize("fault", ["flip", "delete", "truncate"])
@pytest.mark.parametrize("method", ["hidden", "kv"])
def test_lost_chunks_are_recomputed_with_one_warning(
    make_engine: HarnessFactory,
    oracle: Oracle,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    method: str,
    fault: str,
) -> None:
    harness = make_engine(disk=tmp_path, checkpoint_method=method)
    first = harness.submit(random_ids(300, 10), prefix=PREFIX)
    harness.run()
    history = random_ids(300, 10) + harness.ids(first)
    make_engine.close(harness)
    harness = make_engine(disk=tmp_path, checkpoint_method=method)
    chunk_files = [p for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_size > 300_000]
    biggest = max(chunk_files, key=lambda p: p.stat().st_size)
    data = bytearray(biggest.read_bytes())
    if fault == "flip":
        data[len(data) // 2] ^= 1
        biggest.write_bytes(data)
    elif fault == "delete":
        biggest.unlink()
    else:
        biggest.write_bytes(data[: len(data) // 2])
    with caplog.at_level(logging.WARNING, logger="engine"):
        request = harness.submit(
            [7, 8, 9], prefix=PREFIX, history=history, computed=len(history) - 1
        )
        harness.run()
    record = harness.done(request).stats
    assert record.recomputed_tokens > 0
    assert record.recomputed_tokens + record.restored_tokens == len(history) - 1
    if fault != "delete":
        assert record.restored_tokens > 0
    assert harness.ids(request) == oracle.greedy([*PREFIX, *history, 7, 8, 9], 12)
    warnings = [r for r in caplog.records if "cannot be used" in r.getMessage()]
    assert len(warnings) == 1
    # what was recomputed is saved again
    again = harness.submit([4, 4], chat="b", prefix=PREFIX)
    harness.run()
    assert harness.done(again).finish == "length"


def test_another_model_or_dtype_is_a_miss(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path
) -> None:
    harness = make_engine(disk=tmp_path, dtype="bf16")
    harness.submit(random_ids(150, 10), prefix=PREFIX)
    harness.run()
    make_engine.close(harness)
    harness = make_engine(disk=tmp_path, dtype="fp32")
    history = random_ids(150, 10)
    request = harness.submit([7], prefix=PREFIX, history=history)
    harness.run()
    assert harness.done(request).stats.recomputed_tokens == 150
    assert harness.ids(request) == oracle.greedy([*PREFIX, *history, 7], 12)


def test_forget_drops_memory_and_files(make_engine: HarnessFactory, tmp_path: Path) -> None:
    harness = make_engine(disk=tmp_path)
    request = harness.submit(random_ids(150, 10))
    harness.run()
    assert harness.store is not None
    assert harness.store.flush(10.0)
    assert harness.store.bytes_used > 0
    harness.engine.handle(Forget(call_id=7, chat_ids=["a"]))
    assert harness.events[-1] == Forgotten(call_id=7)
    assert harness.store.flush(10.0)
    assert harness.store.bytes_used == 0
    harness.engine.scheduler.check()
    history = random_ids(150, 10) + harness.ids(request)
    again = harness.submit([5], history=history, computed=len(history) - 1)
    harness.run()
    assert harness.done(again).stats.recomputed_tokens == len(history) - 1


def test_a_failed_step_fails_its_requests_and_the_engine_lives(
    make_engine: HarnessFactory, oracle: Oracle
) -> None:
    harness = make_engine()
    request = harness.submit(random_ids(20, 3), prefix=PREFIX)
    harness.step()
    harness.engine.fail_all("the disk is on fire")
    assert harness.failed(request).reason == "the disk is on fire"
    assert free_pages(harness) == harness.engine.scheduler.pool.num_pages
    again = harness.submit(random_ids(20, 3), prefix=PREFIX)
    harness.run()
    assert harness.ids(again) == oracle.greedy(PREFIX + random_ids(20, 3), 12)
    assert not [e for e in harness.events if isinstance(e, Failed) and e.request_id == again]


@pytest.mark.parametrize("method", ["hidden", "kv"])
def test_a_full_staging_drops_chunks_not_the_chat(
    make_engine: HarnessFactory, oracle: Oracle, tmp_path: Path, method: str
) -> None:
    harness = make_engine(
        disk=tmp_path, checkpoint_method=method, staging_bytes=500_000, prefill_chunk=512
    )
    request = harness.submit(random_ids(500, 3), prefix=PREFIX)
    harness.run()
    assert harness.ids(request) == oracle.greedy(PREFIX + random_ids(500, 3), 12)
    assert stats(harness).stats.stripes_dropped > 0
    history = random_ids(500, 3) + harness.ids(request)
    make_engine.close(harness)
    harness = make_engine(disk=tmp_path, checkpoint_method=method)
    again = harness.submit([7], prefix=PREFIX, history=history, computed=len(history) - 1)
    harness.run()
    assert harness.ids(again) == oracle.greedy([*PREFIX, *history, 7], 12)
    assert harness.done(again).stats.recomputed_tokens > 0
