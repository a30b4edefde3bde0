"""Runs one step of the model and records what its checkpoint needs."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from engine.batch import Batch, Segment, build_batch, moved
from engine.cuda_graphs import DecodeGraphs
from engine.memory.kv_cache import KVCache
from engine.memory.page_pool import PAGE_SIZE
from engine.memory.sequence import IdDigest, Sequence
from engine.model.attention import Gate, StepAttention
from engine.model.decoder import Decoder, Record
from engine.model.weights import Weights
from kernels.prefix_choice import PrefixKernel

if TYPE_CHECKING:
    from engine.restoration.checkpoint import Recorder


class ModelRunner:
    """Owns the decoder. Engine thread only."""

    def __init__(
        self,
        weights: Weights,
        cache: KVCache,
        recorder: Recorder | None,
        gate: Gate,
        make_graphs: Callable[[Decoder], DecodeGraphs] | None = None,
        prefix_kernel: PrefixKernel | None = None,
    ) -> None:
        """make_graphs: for decode steps to run as captured graphs, with the same recorder.

        prefix_kernel: for shared nodes in steps that are not captured; None: the default.
        """
        self.decoder = Decoder(weights, cache)
        self.graphs = None if make_graphs is None else make_graphs(self.decoder)
        self.prefix_tokens_shared = 0
        self._config = weights.config
        self._device = cache.kv.device
        self._recorder = recorder
        self._gate = gate
        self._prefix_kernel = prefix_kernel
        self._attention: StepAttention | None = None  # of the last step

    def run(self, decode: Seq[Segment], prefill: Seq[Segment]) -> tuple[Batch, Tensor]:
        """Run the segments' tokens; their K/V are in the cache afterwards.

        Returns the batch and logits [num_logits, vocab_size], fp32 or bf16, a row for each of
        `batch.logit_segments`, valid until the next run. Sequences' `num_computed` is the caller's
        to advance.
        """
        return self._run(decode, prefill, self._recorder)

    def _run(
        self, decode: Seq[Segment], prefill: Seq[Segment], recorder: Recorder | None
    ) -> tuple[Batch, Tensor]:
        batch = build_batch(decode, prefill)
        attention = self._attention
        if attention is None or not attention.advance(batch):
            attention = self._attention = StepAttention(
                batch,
                self._config.num_heads,
                self._config.head_dim,
                self._gate,
                self._prefix_kernel,
            )
        self.prefix_tokens_shared += attention.shared_tokens
        if recorder is None:
            return batch, self._logits(batch, attention, None)
        from engine.restoration.checkpoint import Span  # not needed where nothing is recorded

        spans = [
            Span(s.seq, s.start, s.end, row)
            for s, row in zip(batch.segments, batch.first_rows, strict=True)
        ]
        recorder.begin_step(spans)
        logits = self._logits(batch, attention, recorder.record)
        recorder.end_step(spans)
        return batch, logits

    def _logits(self, batch: Batch, attention: StepAttention, record: Record | None) -> Tensor:
        logits = None if self.graphs is None else self.graphs.run(batch, attention)
        if logits is None:
            logits = self.decoder.forward(moved(batch, self._device), attention, record)
        return logits

    def warm_up(self, page: int) -> None:
        """Run a prompt and a decode step, for what is compiled at its first use on CUDA.

        page: held by nobody, written.
        """
        seq = Sequence("warm-up", [0] * PAGE_SIZE, 0, IdDigest())
        seq.page_ids = [page]
        last = Segment(seq, (), PAGE_SIZE - 1, PAGE_SIZE, True)
        self._run([], [replace(last, start=0)], None)
        self._run([last], [], None)
