"""What checkpoints in few bits do to answers: how far next-token distributions move.

One text goes through the model in fp32. Then again, with the K/V of every token and layer replaced
by those that a restore makes of a checkpoint: of hidden states or of K/V, in the precision of the
row. `kl` is the mean over the tokens of the Kullback-Leibler divergence of the next token's
distribution from the fp32 model's, in nats; `same_best` the share of tokens whose likeliest next
token is the same. `bits` 16 is bf16; `rotated`: whether the model ran in the rotated basis, without
which hidden states cannot be coded. `bytes_per_token` is what a chat takes on disk. Refused when a
row that a server may be told to use exceeds its `limit`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.agreement import divergence
from benchmarks.report import Options, Refused, Row, progress, run
from benchmarks.texts import text_ids
from engine.batch import Batch, Segment, build_batch
from engine.config import CheckpointBits
from engine.memory.kv_cache import KVCache
from engine.memory.page_pool import PAGE_SIZE
from engine.memory.sequence import IdDigest, Sequence
from engine.model.attention import FixedGate, StepAttention
from engine.model.decoder import Decoder, Record
from engine.model.model_config import read_model_config
from engine.model.tokenizer import ChatTokenizer
from engine.model.weight_loading import load_weights
from engine.model.weights import Weights
from engine.restoration.coding import Coding
from kernels.coding import decode_hidden, decode_kv, encode_hidden, encode_kv
from kernels.threading import configure_torch

TOKENS = 1024
QUICK_TOKENS = 512
ROWS_AT_ONCE = 256  # of logits


@dataclass(frozen=True)
class Case:
    """One row: what is stored and how."""

    method: str
    bits: CheckpointBits
    rotated: bool
    limit: float | None  # of the divergence


CASES = (
    Case("hidden", 16, False, None),
    Case("hidden", 8, False, None),
    Case("hidden", 8, True, 2e-4),
    Case("hidden", 6, True, 2e-3),
    Case("kv", 16, False, None),
    Case("kv", 8, False, 2e-3),
)


class Text:
    """A text in one sequence of an fp32 model, and its next-token logits."""

    def __init__(self, weights: Weights, ids: list[int]) -> None:
        config = weights.config
        pages = -(-len(ids) // PAGE_SIZE)
        self.weights = weights
        self.cache = KVCache(
            config.num_layers, pages, config.num_kv_heads, config.head_dim, torch.float32
        )
        self.decoder = Decoder(weights, self.cache)
        seq = Sequence("text", ids, 0, IdDigest())
        seq.page_ids = list(range(pages))
        batch = build_batch([], [Segment(seq, (), 0, len(ids), True)])
        self.batch = replace(batch, logit_rows=torch.arange(len(ids)))

    def logits(
        self, record: Record | None, put: Callable[[int, Tensor, Tensor], None] | None
    ) -> Tensor:
        """fp32 [tokens, vocab_size]; `put(layer, k, v)` may change K/V before they are read."""
        config = self.weights.config
        attention = _Attention(self.batch, config.num_heads, config.head_dim, put)
        return self.decoder.forward(self.batch, attention, record)

    def hidden(self) -> tuple[Tensor, Tensor]:
        """Logits, and the inputs of all layers [layers, tokens, D]."""
        kept: list[Tensor] = []
        logits = self.logits(lambda _, hidden: kept.append(hidden.clone()), None)
        return logits, torch.stack(kept)


class _Attention:
    """A step's attention that counts its layers."""

    def __init__(
        self,
        batch: Batch,
        num_heads: int,
        head_dim: int,
        put: Callable[[int, Tensor, Tensor], None] | None,
    ) -> None:
        self._attention = StepAttention(batch, num_heads, head_dim, FixedGate(True))
        self._put = put
        self._layer = 0

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, result: Tensor) -> None:
        if self._put is not None:
            self._put(self._layer, k_cache, v_cache)
        self._layer += 1
        self._attention(q, k_cache, v_cache, result)


def measure(options: Options) -> Row:
    """Run it; returns the result. Raises Refused."""
    configure_torch()
    config = read_model_config(options.model_dir)
    count = QUICK_TOKENS if options.quick else TOKENS
    ids = text_ids(ChatTokenizer(options.model_dir), count)
    rows: list[Row] = []
    reference: Tensor | None = None
    for rotated in (False, True):
        progress(f"loading {options.model_name}{', rotated' if rotated else ''}")
        weights = load_weights(options.model_dir, config, torch.float32, count, rotate=rotated)
        text = Text(weights, ids)
        plain, hidden = text.hidden()
        if reference is None:
            reference = plain
        else:
            kl = float(divergence(plain, reference).mean())
            if kl > 1e-7:
                raise Refused(f"the rotated model is another one: KL divergence {kl:.1e} nats")
        for case in (case for case in CASES if case.rotated == rotated):
            progress(f"{case.method} in {case.bits} bits")
            kv = _from_hidden(text, hidden, case.bits) if case.method == "hidden" else None
            logits = text.logits(None, _replaced(kv, case.bits))
            rows.append(_row(case, weights, logits, reference))
    return {
        "machine": machine.describe(),
        "model": options.model_name,
        "tokens": count,
        "rows": rows,
    }


def _from_hidden(text: Text, hidden: Tensor, bits: int) -> Tensor:
    """K/V [layers, 2, slots, heads, head_dim] of all layers, each from its stored input.

    That of the first layer is not stored: it is the embedding.
    """
    config, tokens = text.weights.config, hidden.shape[1]
    cache = KVCache(
        config.num_layers,
        len(text.batch.segments[0].seq.page_ids),
        config.num_kv_heads,
        config.head_dim,
        torch.float32,
    )
    decoder = Decoder(text.weights, cache)
    back = hidden.clone()
    for start in range(0, tokens, PAGE_SIZE):
        stripe = hidden[1:, start : start + PAGE_SIZE]
        into = back[1:, start : start + PAGE_SIZE]
        if bits == 16:
            into.copy_(stripe.bfloat16())
            continue
        rows = stripe.shape[1]
        total = torch.zeros(stripe.shape[1:])
        for coded, out in zip(encode_hidden(stripe, bits), into, strict=True):
            decode_hidden(coded, rows, bits, total, out)
    for layer, rows_of_layer in enumerate(back):
        decoder.restore(layer, rows_of_layer, text.batch.positions, text.batch.slots)
    return cache.kv


def _replaced(kv: Tensor | None, bits: int) -> Callable[[int, Tensor, Tensor], None]:
    """What puts stored K/V in place of those just computed; without `kv` these are coded."""

    def put(layer: int, k: Tensor, v: Tensor) -> None:
        if kv is not None:
            k.copy_(kv[layer, 0])
            v.copy_(kv[layer, 1])
        elif bits == 16:
            k.copy_(k.bfloat16())
            v.copy_(v.bfloat16())
        else:
            both = torch.stack([k, v])[None]
            decode_kv(encode_kv(both, 0, len(k)), len(k), both, slice(0, len(k)))
            k.copy_(both[0, 0])
            v.copy_(both[0, 1])

    return put


def _row(case: Case, weights: Weights, logits: Tensor, reference: Tensor) -> Row:
    kl = torch.cat(
        [
            divergence(*parts)
            for parts in zip(logits.split(ROWS_AT_ONCE), reference.split(ROWS_AT_ONCE), strict=True)
        ]
    )
    mean = float(kl.mean())
    if case.limit is not None and mean > case.limit:
        raise Refused(
            f"{case.method} in {case.bits} bits: KL divergence {mean:.2e} nats, at most "
            f"{case.limit:.0e}"
        )
    config = weights.config
    coding = Coding(case.bits, "bf16")
    if case.method == "hidden":
        stored = (config.num_layers - 1) * coding.hidden_bytes(config.hidden_size)
    else:
        stored = config.num_layers * coding.kv_bytes(config.num_kv_heads, config.head_dim)
    return {
        "method": case.method,
        "bits": case.bits,
        "rotated": case.rotated,
        "kl": float(f"{mean:.3g}"),
        "limit": case.limit,
        "worst_token_kl": float(f"{float(kl.max()):.3g}"),
        "same_best": round(float((logits.argmax(-1) == reference.argmax(-1)).float().mean()), 4),
        "bytes_per_token": stored,
    }


def main(argv: Seq[str] | None = None) -> int:
    """Command line."""
    return run("coding", __doc__, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
