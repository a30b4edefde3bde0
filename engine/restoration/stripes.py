"""Stripes as a restore needs them: which are there, and what of their layers is stored."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from engine.memory.page_pool import PAGE_SIZE
from engine.memory.sequence import Sequence
from engine.restoration.chunk_store import ChunkStore, LayerChunk, LoadedStripe, StripeRef
from engine.restoration.plan import RestoredPart


def find_stripes(
    store: ChunkStore, seq: Sequence, fingerprint: bytes, start: int, end: int
) -> list[StripeRef]:
    """Stripes on disk that hold tokens of [start, end) of a sequence, in order of position.

    Their own positions count from the owner's first token.
    """
    if start >= end:
        return []
    stripes = range(start // PAGE_SIZE, -(-end // PAGE_SIZE))
    wanted = [
        (
            seq.offset + s * PAGE_SIZE,
            seq.digest_before(s).value,
            seq.array(s * PAGE_SIZE, min(end, (s + 1) * PAGE_SIZE)),
        )
        for s in stripes
    ]
    return [ref for ref in store.find(seq.owner, fingerprint, wanted) if ref is not None]


def layer_methods(ref: StripeRef) -> tuple[str, ...]:
    """The method of every stored layer, in order; those before the first stored are not."""
    return tuple(chunk.method for chunk in ref.chunks)


def absent_layers(ref: StripeRef, num_layers: int) -> int | None:
    """How many of the first layers a stripe does not store; None when others are missing too."""
    first = num_layers - len(ref.chunks)
    layers = [chunk.layer for chunk in ref.chunks]
    return first if layers == list(range(first, num_layers)) else None


def restored_parts(refs: Seq[StripeRef], position: int, num_layers: int) -> list[RestoredPart]:
    """How the tokens of these stripes come back: a part for each run of like ones.

    `position` is that of the owner's first token.
    """
    parts: list[RestoredPart] = []
    for ref in refs:
        absent = absent_layers(ref, num_layers)
        if absent is None:
            continue
        methods = layer_methods(ref)
        part = RestoredPart(
            start=position + ref.start,
            num_tokens=ref.usable,
            recompute=max(0, absent - 1),
            hidden=methods.count("hidden") + (absent > 0),
            kv=methods.count("kv"),
            num_bytes=ref.payload_bytes,
        )
        last = parts[-1] if parts else None
        if (
            last is not None
            and last.start + last.num_tokens == part.start
            and (last.recompute, last.hidden, last.kv) == (part.recompute, part.hidden, part.kv)
        ):
            parts[-1] = replace(
                last,
                num_tokens=last.num_tokens + part.num_tokens,
                num_bytes=last.num_bytes + part.num_bytes,
            )
        else:
            parts.append(part)
    return parts


def hidden_rows(stripe: LoadedStripe, chunk: LayerChunk, dtype: torch.dtype) -> Tensor:
    """The usable rows of a layer's stored hidden states, [usable, hidden_size], a view."""
    assert stripe.payload is not None, "a stripe without payload was taken for good"
    raw = torch.from_numpy(stripe.payload)[chunk.offset : chunk.offset + chunk.length]
    return raw.view(dtype).view(stripe.ref.num_tokens, -1)[: stripe.ref.usable]


def kv_runs(chunks: Seq[LayerChunk]) -> list[list[LayerChunk]]:
    """The K/V chunks of a stripe, grouped into runs of layers whose bytes are adjacent."""
    runs: list[list[LayerChunk]] = []
    for chunk in chunks:
        if chunk.method != "kv":
            continue
        last = runs[-1][-1] if runs else None
        if last is not None and (chunk.layer, chunk.offset) == (
            last.layer + 1,
            last.offset + last.length,
        ):
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    return runs


def put_kv(kv: Tensor, layers: range, slots: slice, payload: Tensor, num_tokens: int) -> None:
    """Copy the stored K/V of some adjacent layers to the slots of a stripe's leading tokens.

    kv as of KVCache, written; payload uint8 [bytes], a chunk of `num_tokens` rows per layer one
    after another.
    """
    rows = payload.view(kv.dtype).view(len(layers), 2, num_tokens, *kv.shape[3:])
    kv[layers.start : layers.stop, :, slots] = rows[:, :, : slots.stop - slots.start]
