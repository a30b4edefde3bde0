"""What answers cost, and how long they took: the engine's own figures under known names."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from app.api.generation import Answer, Generation
from engine.messages import TurnStats


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of chat completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int | None  # null: not known, as the answer was cut off
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of responses."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """An addition to OpenAI's API: where the time went (milliseconds), and the state's origin.

    `ttft_ms` is from the server's receipt of the request to the first token; null: there was none.
    """

    ttft_ms: float | None
    queue_ms: float
    restore_ms: float
    prefill_ms: float
    total_ms: float
    shared_tokens: int  # of the system prompt, in memory already or read back
    resident_tokens: int
    restored_tokens: int
    recomputed_tokens: int
    new_tokens: int


def cached_tokens(stats: TurnStats) -> int:
    """Tokens of the prompt that this answer did not have to compute."""
    shared = stats.prefix_tokens - stats.prefix_computed_tokens
    return max(0, shared) + stats.resident_tokens + stats.restored_tokens


def usage_of(answers: Sequence[Answer]) -> Usage | None:
    """Of all candidates of one prompt; None when the engine measured nothing."""
    stats = [one.stats for one in answers if one.stats is not None]
    if not stats:
        return None
    completion = sum(one.tokens_out for one in stats)
    return Usage(
        prompt_tokens=stats[0].tokens_in,
        completion_tokens=completion,
        total_tokens=stats[0].tokens_in + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens(stats[0])),
    )


def response_usage_of(answer: Answer) -> ResponseUsage | None:
    """None when the engine measured nothing."""
    stats = answer.stats
    if stats is None:
        return None
    return ResponseUsage(
        input_tokens=stats.tokens_in,
        input_tokens_details=InputTokensDetails(cached_tokens=cached_tokens(stats)),
        output_tokens=stats.tokens_out,
        output_tokens_details=OutputTokensDetails(),
        total_tokens=stats.tokens_in + stats.tokens_out,
    )


def partial_usage(input_tokens: int, output_tokens: int) -> ResponseUsage:
    """Of an answer that was cut off before the engine told what it measured."""
    return ResponseUsage(
        input_tokens=input_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=None),
        output_tokens=output_tokens,
        output_tokens_details=OutputTokensDetails(),
        total_tokens=input_tokens + output_tokens,
    )


def timings_of(generation: Generation, received_at: float) -> Timings | None:
    """Of the first candidate; None when the engine measured nothing."""
    stats = generation.answers[0].stats
    if stats is None:
        return None
    first = generation.first_token_at
    return Timings(
        ttft_ms=None if first is None else (first - received_at) * 1e3,
        queue_ms=stats.queue_ms,
        restore_ms=stats.restore_ms,
        prefill_ms=stats.prefill_ms,
        total_ms=stats.total_ms,
        shared_tokens=max(0, stats.prefix_tokens - stats.prefix_computed_tokens),
        resident_tokens=stats.resident_tokens,
        restored_tokens=stats.restored_tokens,
        recomputed_tokens=stats.recomputed_tokens,
        new_tokens=stats.new_tokens,
    )
