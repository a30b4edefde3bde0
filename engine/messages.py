"""What app and engine process say to each other: ids, text and records, never tensors.

One msgpack message a frame; the union of each direction is tagged by the struct's name.
Durations are milliseconds of the monotonic clock.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Phase = Literal["queued", "restoring", "reading", "answering"]
FinishReason = Literal["eos", "stop", "length", "cancelled"]
FailureKind = Literal["context_overflow", "queue_full", "internal", "engine_died"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. Noise depends on seed, candidate and position alone."""

    temperature: float = 0.7  # 0 is greedy
    top_p: float = 0.95
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One turn: the token ids of the whole path, and how to go on from there.

    The sequence is prefix_ids + history_ids + new_ids. `history_computed` counts the leading
    history tokens that have had K/V before (all of them, or one fewer when the last sampled
    token was never run).
    Prefixes share their common beginning within a scope and never across scopes. Turns of one
    chat that run at once are candidates: the same ids, each with its own number, and the chat's
    K/V held and read once for all of them. With `saves` false nothing of the turn is written to
    disk, and the chat is not changed by it: it goes on from what is held of the chat, on a branch
    that later turns with `saves` do not see. (Its prefix is written; to avoid that, send none.)
    """

    request_id: str
    chat_id: str
    prefix_ids: list[int]
    history_ids: list[int]
    history_computed: int
    new_ids: list[int]
    sampling: SamplingParams
    prefix_scope: str = ""  # whose prefix it is: an assistant
    candidate: int = 0  # sampling noise is a function of (seed, candidate, position)
    saves: bool = True  # whether what this turn adds is checkpointed
    answered: int = 0  # of the last tokens: those of an answer that is gone on with
    top_logprobs: int | None = None  # likeliest tokens told beside each chosen one; None: nothing
    logit_bias: dict[int, float] = {}  # added to the logits of these token ids
    grammar: str = ""  # what the answer must match, as `engine.model.json_grammar` writes it


class Cancel(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop a request; confirmed by its `Done` with finish "cancelled"."""

    request_id: str


class Warm(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bring a chat's state back before its next message; lowest priority."""

    chat_id: str
    prefix_ids: list[int]
    history_ids: list[int]
    prefix_scope: str = ""


class Forget(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Drop everything that is held of these chats, on disk too; answered by `Forgotten`."""

    call_id: int
    chat_ids: list[str]


class Collect(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Drop checkpoints of other weights, and all that is on disk of these owners.

    Owners are named as the chunk store names them. Nothing in memory is touched. Answered by
    `Forgotten`.
    """

    call_id: int
    owners: list[str]


class GetStats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answered by `Stats`."""

    call_id: int


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Flush checkpoints and end the process."""


ToEngine = Submit | Cancel | Warm | Forget | Collect | GetStats | Shutdown


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sent once, when the engine can serve."""

    model_name: str
    family: str
    dtype: str  # of activations and K/V
    weights: str  # format of the weights: "fp32", "bf16", "int8" or "int4"
    num_layers: int
    context_length: int
    vocab_size: int
    page_size: int
    num_pages: int
    bytes_per_token_kv: int
    bytes_per_token_checkpoint: int
    checkpoint_method: str  # the method in use, never "auto"
    checkpoint_reason: str  # why, in one sentence
    fingerprint: str
    load_ms: float


class Status(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Where a request stands before its first token; tokens done of total."""

    request_id: str
    phase: Phase
    done: int = 0
    total: int = 0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities, before temperature, penalties, bias and grammar."""

    logprob: float  # of the token chosen
    top: list[tuple[int, float]]  # the likeliest ones, best first


class Delta(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """New token ids and the text that became certain; text may lag behind ids.

    Incomplete UTF-8 and a possible stop string are held back; the concatenation of all texts is
    the answer, byte for byte.
    """

    request_id: str
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None = None  # of each of token_ids, when asked for


class TurnStats(msgspec.Struct, frozen=True, kw_only=True):
    """The latency record of a turn. Every prompt token is counted in exactly one `*_tokens`.

    tokens_in = prefix_tokens + resident_tokens + restored_tokens + recomputed_tokens + new_tokens,
    where prefix_tokens are those of the shared prefix (however they came to be resident).
    """

    queue_ms: float
    restore_ms: float  # wall time from the first read to the last page written
    restore_io_ms: float  # time that readers spent in reads and checksums
    restore_compute_ms: float  # time that the engine spent in restoring kernels
    restore_method: str  # "" when nothing was restored
    restore_bytes: int
    prefill_ms: float
    ttft_ms: float | None  # engine's receipt to first token; None: there was none
    itl_p50_ms: float | None  # None with fewer than two tokens
    itl_p95_ms: float | None
    total_ms: float
    tokens_in: int
    tokens_out: int
    prefix_tokens: int
    resident_tokens: int
    restored_tokens: int
    recomputed_tokens: int
    new_tokens: int
    batch_size: float  # mean number of sequences in the steps that decoded it
    prefix_restored_tokens: int = 0  # of prefix_tokens: read from its checkpoint by this turn
    prefix_computed_tokens: int = 0  # of prefix_tokens: computed by this turn
    preemptions: int = 0
    restore_plan: str = ""  # how many layers came back in which way; "" when nothing was restored
    restore_predicted_ms: float | None = None  # of restore_ms; None: nothing was measured before
    restored_from_memory: int = 0  # of restored_tokens: from host memory, not from disk
    # (kind, start_ms, end_ms, tokens, layers) each, kinds read, compute, recompute; from the
    # restore's start, at most 64
    restore_spans: list[tuple[str, float, float, int, int]] = []


class Done(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request ended; all its ids and text were sent before. Never followed by anything."""

    request_id: str
    finish: FinishReason
    stats: TurnStats


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request ended without an answer; `reason` can be shown to its user."""

    request_id: str
    kind: FailureKind
    reason: str


class Forgotten(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing is held of those chats any more, unless there is an `error`."""

    call_id: int
    error: str = ""


class PrefixUse(msgspec.Struct, frozen=True, kw_only=True):
    """The prefixes of one scope in memory, held once, and the chats in memory behind them."""

    scope: str
    held_tokens: int
    chats: int  # that run or rest in memory
    chat_tokens: int  # of their prefixes: what they would hold if each had its own


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters since the engine started. Bytes and tokens as named."""

    running: int
    waiting: int
    restoring: int
    resident_chats: int
    prefix_nodes: int
    pages_total: int
    pages_free: int
    steps: int
    tokens_decoded: int
    tokens_prefilled: int
    tokens_restored: int
    tokens_recomputed: int
    prefix_tokens_shared: int
    preemptions: int
    evictions: int
    stripes_written: int
    stripes_dropped: int
    stripes_rejected: int  # missing, foreign or corrupt
    write_refusals: int  # writes of checkpoints that the system did not take
    disk_bytes: int
    disk_cap_bytes: int
    last_step_age_ms: float  # time since the engine's loop last came round
    prefixes: tuple[PrefixUse, ...] = ()
    write_trouble: str = ""  # why the last write of a checkpoint was refused; empty: it was taken
    host_cache_bytes: int = 0  # held in memory of chats that left the KV cache
    tokens_from_memory: int = 0  # of tokens_restored: from there, not from disk
    tokens_drafted: int = 0  # by prompt lookup
    tokens_accepted: int = 0  # of those: what the model chose


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    call_id: int
    stats: EngineStats


class Fatal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine cannot start; `reason` is for the operator. The process ends after it."""

    reason: str


FromEngine = EngineInfo | Status | Delta | Done | Failed | Forgotten | Stats | Fatal
TurnEvent = Status | Delta | Done | Failed
