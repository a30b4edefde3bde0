"""Steps that read prompts beside decoding chats stay within their bound."""

from __future__ import annotations

from engine.chunking import ADDED_S, LEAST_TOKENS, ChunkSize
from tests.engine.harness import HarnessFactory, Oracle
from tests.engine.harness import random_ids as tokens


def test_the_limit_until_a_token_s_cost_is_known_and_when_nobody_decodes() -> None:
    size = ChunkSize(512)
    assert size.tokens(decoding=True) == 512
    for _ in range(4):
        size.ran(0, 512, 1.0)
    assert size.tokens(decoding=False) == 512
    assert size.tokens(decoding=True) == int(ADDED_S / (1.0 / 512))


def test_what_decoding_costs_anyway_is_taken_off() -> None:
    size = ChunkSize(1000)
    for _ in range(4):
        size.ran(8, 0, 0.05)
        size.ran(8, 100, 0.05 + 100 * 0.001)
    assert abs(size.tokens(decoding=True) - ADDED_S / 0.001) <= 1


def test_one_slow_step_does_not_count_and_a_slow_machine_has_its_least() -> None:
    size = ChunkSize(1000)
    for seconds in (0.1, 9.0, 0.1, 0.1, 0.1):
        size.ran(0, 100, seconds)
    assert size.tokens(decoding=True) == int(ADDED_S / 0.001)
    for _ in range(8):
        size.ran(0, 100, 100.0)
    assert size.tokens(decoding=True) == LEAST_TOKENS


def test_short_ends_of_prompts_are_not_measured() -> None:
    size = ChunkSize(1000)
    for _ in range(8):
        size.ran(0, 3, 1.0)
    assert size.tokens(decoding=True) == 1000


def test_a_long_prompt_beside_a_running_chat(make_engine: HarnessFactory, oracle: Oracle) -> None:
    """Smaller chunks while a chat decodes change no answer."""
    harness = make_engine(prefill_chunk=256)
    for _ in range(8):
        harness.engine.scheduler.chunk.ran(0, 100, 0.3)  # a machine that reads 333 tokens a second
    running = harness.submit(tokens(20, 3), chat="a", max_tokens=40)
    harness.step()
    harness.step()
    long = tokens(300, 4)
    reading = harness.submit(long, chat="b", max_tokens=4)
    before = harness.engine.stats().tokens_prefilled
    harness.step()
    assert harness.engine.stats().tokens_prefilled - before == int(ADDED_S / 0.003)
    harness.run()
    assert harness.ids(running) == oracle.greedy(tokens(20, 3), 40)
    assert harness.ids(reading) == oracle.greedy(long, 4)
