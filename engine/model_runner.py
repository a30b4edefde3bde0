"""Runs one step of the model and records what its checkpoint needs."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from engine.batch import Batch, Segment, build_batch
from engine.memory.kv_cache import KVCache
from engine.model.attention import Gate, StepAttention
from engine.model.decoder import Decoder
from engine.model.weights import Weights
from engine.restoration.checkpoint import Recorder, Span


class ModelRunner:
    """Owns the decoder. Engine thread only."""

    def __init__(
        self, weights: Weights, cache: KVCache, recorder: Recorder | None, gate: Gate
    ) -> None:
        self.decoder = Decoder(weights, cache)
        self.prefix_tokens_shared = 0
        self._config = weights.config
        self._recorder = recorder
        self._gate = gate
        self._attention: StepAttention | None = None  # of the last step

    def run(self, decode: Seq[Segment], prefill: Seq[Segment]) -> tuple[Batch, Tensor]:
        """Run the segments' tokens; their K/V are in the cache afterwards.

        Returns the batch and fp32 logits [num_logits, vocab_size], a row for each of
        `batch.logit_segments`. Sequences' `num_computed` is the caller's to advance.
        """
        batch = build_batch(decode, prefill)
        attention = self._attention
        if attention is None or not attention.advance(batch):
            attention = self._attention = StepAttention(
                batch, self._config.num_heads, self._config.head_dim, self._gate
            )
        self.prefix_tokens_shared += attention.shared_tokens
        if self._recorder is None:
            return batch, self.decoder.forward(batch, attention, None)
        spans = [
            Span(s.seq, s.start, s.end, row)
            for s, row in zip(batch.segments, batch.first_rows, strict=True)
        ]
        self._recorder.begin_step(spans)
        logits = self.decoder.forward(batch, attention, self._recorder.record)
        self._recorder.end_step(spans)
        return batch, logits
