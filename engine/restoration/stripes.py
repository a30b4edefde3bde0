"""Stripes as a restore needs them: which are there, and what of their layers is stored."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from engine.memory.page_pool import PAGE_SIZE
from engine.memory.sequence import Sequence
from engine.restoration.chunk_store import ChunkStore, LayerChunk, LoadedStripe, StripeRef
from engine.restoration.coding import CODED_BITS, SCALE_BYTES
from engine.restoration.host_tier import HostRef
from engine.restoration.plan import RestoredPart
from kernels.coding import decode_hidden, decode_kv


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
            num_bytes=0 if isinstance(ref, HostRef) else ref.payload_bytes,
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


class HiddenRows:
    """The usable rows of stripes that are stored alike; coded layers must be asked for in order."""

    def __init__(
        self, stripes: Seq[LoadedStripe], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._stripes = stripes
        self._dtype = dtype
        self._device = device
        self._total: Tensor | None = None  # of coded layers: the last one, as it came back

    def layer(self, index: int) -> Tensor:
        """The hidden states of the chunk at this place in each stripe, [rows, hidden_size]."""
        coding = self._stripes[0].ref.chunks[index].coding
        if coding in CODED_BITS:
            return self._decoded(index, CODED_BITS[coding])
        return torch.cat(
            [
                _raw(stripe, index)
                .view(self._dtype)
                .view(stripe.ref.num_tokens, -1)[: stripe.ref.usable]
                for stripe in self._stripes
            ]
        )

    def _decoded(self, index: int, bits: int) -> Tensor:
        rows = sum(stripe.ref.usable for stripe in self._stripes)
        first = self._stripes[0].ref
        width = (first.chunks[index].length // first.num_tokens - SCALE_BYTES) * 8 // bits
        if self._total is None:
            self._total = torch.zeros(rows, width, device=self._device)
        out = torch.empty(rows, width, dtype=self._dtype, device=self._device)
        at = 0
        for stripe in self._stripes:
            raw, ref = _raw(stripe, index).to(self._device), stripe.ref
            part = slice(at, at + ref.usable)
            decode_hidden(raw, ref.num_tokens, bits, self._total[part], out[part])
            at += ref.usable
        return out


def _raw(stripe: LoadedStripe, index: int) -> Tensor:
    """The bytes of the stripe's chunk at this place, a view."""
    assert stripe.payload is not None, "a stripe without payload was taken for good"
    chunk = stripe.ref.chunks[index]
    return torch.from_numpy(stripe.payload)[chunk.offset : chunk.offset + chunk.length]


def kv_runs(chunks: Seq[LayerChunk]) -> list[list[LayerChunk]]:
    """The K/V chunks of a stripe, grouped into runs of layers whose bytes are adjacent.

    The chunks of a stripe have one coding for each method.
    """
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


def put_kv(
    kv: Tensor, layers: range, slots: slice, payload: Tensor, num_tokens: int, coding: str
) -> None:
    """Copy the stored K/V of some adjacent layers to the slots of a stripe's leading tokens.

    kv as of KVCache, written; payload uint8 [bytes], a chunk of `num_tokens` rows per layer one
    after another, all of one coding.
    """
    if coding in CODED_BITS:
        coded = payload.view(len(layers), -1).to(kv.device)
        decode_kv(coded, num_tokens, kv[layers.start : layers.stop], slots)
        return
    rows = payload.view(kv.dtype).view(len(layers), 2, num_tokens, *kv.shape[3:])
    kv[layers.start : layers.stop, :, slots] = rows[:, :, : slots.stop - slots.start]
