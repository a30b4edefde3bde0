"""Layers that are not on disk: run again, in full, over some tokens of one sequence."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from torch import Tensor

from engine.batch import Segment, build_batch, moved
from engine.memory.prefix_tree import NodeState, PrefixNode
from engine.memory.sequence import Sequence
from engine.model.attention import Gate, StepAttention
from engine.model.decoder import Decoder


class LeadingLayers:
    """Runs the first layers over a sequence's tokens. Engine thread only.

    They attend to the shared nodes before the sequence and to its own earlier tokens, so that
    the K/V of these layers must be there for all of them.
    """

    def __init__(self, decoder: Decoder, gate: Gate) -> None:
        self.decoder = decoder
        self._gate = gate

    @staticmethod
    def ready(path: Seq[PrefixNode]) -> bool:
        """Whether all nodes before the sequence have their K/V."""
        return all(node.state is NodeState.READY for node in path)

    def run(
        self, seq: Sequence, path: Seq[PrefixNode], start: int, end: int, num_layers: int
    ) -> Iterator[Tensor]:
        """Run tokens [start, end) through the first layers; their K/V are in the cache then.

        Yields the input of layer 0, 1, ... `num_layers` before its norm, [end - start,
        hidden_size], each valid until the next is asked for.
        """
        batch = build_batch([], [Segment(seq, tuple(path), start, end, False)])
        on_device = moved(batch, self.decoder.weights.embedding.device)
        yield self.decoder.embed(on_device.token_ids)
        if num_layers:
            config = self.decoder.weights.config
            attention = StepAttention(batch, config.num_heads, config.head_dim, self._gate)
            yield from self.decoder.leading(on_device, attention, num_layers)
