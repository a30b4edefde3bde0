"""A batch of sequences over one physical prefix, decoded step by step by our production code."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from engine.batch import Segment
from engine.memory.kv_cache import KVCache
from engine.memory.page_pool import PAGE_SIZE, PagePool, pages_for
from engine.memory.prefix_tree import PrefixNode, PrefixTree
from engine.memory.sequence import IdDigest, Sequence
from engine.messages import SamplingParams
from engine.model.attention import FixedGate
from engine.model.model_config import ModelConfig, read_model_config
from engine.model.sampler import sample
from engine.model.sharing_gate import SharingGate, measure_attention
from engine.model.tokenizer import ChatTokenizer
from engine.model.weight_loading import load_weights
from engine.model_runner import ModelRunner
from engine.profile.weight_figures import WeightFormat
from kernels.warm_up import warm_up

PREFILL_CHUNK = 256  # rows of a prefill step
GREEDY = SamplingParams(temperature=0.0)
Side = Literal["shared", "unshared"]


class Decoding:
    """Owns a model, its K/V memory and a batch of sequences below one prefix. One thread.

    Two runners over the same weights and pages differ only in whether a node's K/V are read once
    for all rows where the gate, measured here as at a server's first start, says so (`shared`), or
    once for each (`unshared`). A step is what the engine runs for one: attention metadata, all
    layers, head and sampler; not its queue. Positions beyond the model's context are allowed.
    """

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        max_batch: int,
        max_prefix: int,
        max_suffix: int,
        format: WeightFormat | None = None,
    ) -> None:
        """Load the model, with pages for one prefix and `max_batch` suffixes of these lengths.

        format: of its weights; None: the dtype.
        """
        self.config: ModelConfig = read_model_config(model_dir)
        self.dtype = dtype
        self.tokenizer = ChatTokenizer(model_dir)
        warm_up(dtype, self.config.head_dim)
        positions = max(self.config.max_position_embeddings, max_prefix + max_suffix)
        weights = load_weights(model_dir, self.config, dtype, positions, format=format)
        self.weights = weights
        pages = pages_for(max_prefix) + max_batch * pages_for(max_suffix)
        self.pool = PagePool(pages)
        self.cache = KVCache(
            self.config.num_layers, pages, self.config.num_kv_heads, self.config.head_dim, dtype
        )
        c = self.config
        self.gate = SharingGate(measure_attention(c.num_heads, c.num_kv_heads, c.head_dim, dtype))
        self.runners: dict[Side, ModelRunner] = {
            "shared": ModelRunner(weights, self.cache, None, self.gate),
            "unshared": ModelRunner(weights, self.cache, None, FixedGate(False)),
        }
        self.node: PrefixNode | None = None
        self.sequences: list[Sequence] = []
        self.first_logits = torch.empty(0)  # [batch, vocab_size], of the suffixes' last tokens

    @property
    def prefix(self) -> int:
        """Tokens of the prefix."""
        return 0 if self.node is None else len(self.node)

    @property
    def _path(self) -> tuple[PrefixNode, ...]:
        return () if self.node is None else (self.node,)

    def begin(self, prefix_ids: list[int], suffixes: list[list[int]]) -> None:
        """Compute K/V of a prefix and of one suffix for each row, all of one length."""
        self._release()
        root = PrefixTree().scope("benchmark")
        if prefix_ids:
            node = PrefixTree().add(root, prefix_ids)
            _reserve(node.seq, len(prefix_ids), self.pool)
            for start in range(0, len(prefix_ids), PREFILL_CHUNK):
                end = min(start + PREFILL_CHUNK, len(prefix_ids))
                self.runners["shared"].run([], [Segment(node.seq, (), start, end, False)])
            node.seq.num_computed = len(prefix_ids)
            self.node = node
        logits: list[Tensor] = []
        group: list[Segment] = []
        for i, ids in enumerate(suffixes):
            seq = Sequence(f"c-{i}", list(ids), self.prefix, IdDigest(prefix_ids))
            _reserve(seq, len(ids), self.pool)
            self.sequences.append(seq)
            group.append(Segment(seq, self._path, 0, len(ids), True))
            if len(group) * len(ids) >= PREFILL_CHUNK or i + 1 == len(suffixes):
                logits.append(self.runners["shared"].run([], group)[1].float())
                group = []
        self.first_logits = torch.cat(logits)
        for seq, token in zip(self.sequences, self.first_logits.argmax(-1).tolist(), strict=True):
            seq.num_computed = len(seq.ids)
            seq.ids.append(token)

    def held_bytes(self, batch: int) -> int:
        """K/V memory of the pages that the prefix and the first `batch` rows hold."""
        held = sum(len(seq.page_ids) for seq in self.sequences[:batch])
        if self.node is not None:
            held += len(self.node.seq.page_ids)
        c = self.config
        return held * KVCache.bytes_per_page(c.num_layers, c.num_kv_heads, c.head_dim, self.dtype)

    def step(self, side: Side, batch: int) -> tuple[float, Tensor, list[int]]:
        """Run the first `batch` rows' last tokens; seconds, logits and greedy ids.

        Nothing advances: another side runs the same step and writes the same K/V again.
        """
        began = time.perf_counter()
        segments = []
        for seq in self.sequences[:batch]:
            _reserve(seq, len(seq.ids), self.pool)
            segments.append(Segment(seq, self._path, len(seq.ids) - 1, len(seq.ids), True))
        _, logits = self.runners[side].run(segments, [])
        positions = [seq.position + len(seq.ids) for seq in self.sequences[:batch]]
        tokens = sample(logits, [GREEDY] * batch, positions, [None] * batch).tolist()
        return time.perf_counter() - began, logits.float(), tokens

    def advance(self, tokens: list[int]) -> None:
        """Append one token to each of the first rows."""
        for seq, token in zip(self.sequences, tokens, strict=False):
            seq.num_computed = len(seq.ids)
            seq.ids.append(token)

    def rewind(self, num_tokens: int) -> None:
        """Cut every row back to its first `num_tokens` tokens, whose last has no K/V yet."""
        for seq in self.sequences:
            seq.truncate(num_tokens, self.pool)
            seq.num_computed = min(seq.num_computed, num_tokens - 1)

    def kv_of(self, seq: Sequence, num_tokens: int) -> Tensor:
        """Copies of a sequence's K and V: [num_layers, 2, num_kv_heads, num_tokens, head_dim]."""
        pages = torch.tensor(seq.page_ids[: pages_for(num_tokens)])
        slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten()[:num_tokens]
        return self.cache.kv[:, :, slots].transpose(2, 3)

    def _release(self) -> None:
        for seq in self.sequences:
            seq.release(self.pool)
        if self.node is not None:
            self.node.seq.release(self.pool)
        self.sequences, self.node = [], None


def _reserve(seq: Sequence, num_tokens: int, pool: PagePool) -> None:
    if not seq.reserve(num_tokens, pool):
        raise ValueError(f"{num_tokens} tokens do not fit in {pool.num_free} free pages")
