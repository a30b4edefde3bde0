"""A few sequences over a tree of nodes, run by one runner; for comparing two of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu_model import TINY, random_weights
from engine.batch import Path, Segment
from engine.cuda_graphs import Capture, DecodeGraphs
from engine.memory.kv_cache import KVCache
from engine.memory.page_pool import PAGE_SIZE, PagePool
from engine.memory.prefix_tree import PrefixNode, Root
from engine.memory.sequence import IdDigest
from engine.memory.sequence import Sequence as Tokens
from engine.model.attention import FixedGate
from engine.model.decoder import Decoder
from engine.model.weights import Weights
from engine.model_runner import ModelRunner
from kernels.prefix_choice import PrefixKernel

NUM_PAGES = 60
MAX_CONTEXT = 512
CONFIG = replace(TINY, num_kv_heads=2, num_heads=4, max_position_embeddings=MAX_CONTEXT)


def tiny_weights(device: str, dtype: torch.dtype = torch.float32) -> Weights:
    """A model whose greedy choices are far from ties."""
    return random_weights(CONFIG, dtype, device, std=0.3)


def random_ids(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(CONFIG.vocab_size), k=count)


@dataclass
class Chat:
    seq: Tokens
    path: Path


class World:
    """Owns a cache full of NaN but for what was written, and the chats that run on it."""

    def __init__(
        self,
        weights: Weights,
        share: bool,
        capture: Capture | None,
        max_rows: int = 16,
        prefix_kernel: PrefixKernel | None = None,
    ) -> None:
        c, device = weights.config, weights.embedding.device
        self.cache = KVCache(
            c.num_layers, NUM_PAGES + 1, c.num_kv_heads, c.head_dim, weights.dtype, device
        )
        self.cache.kv.fill_(float("nan"))
        self.pool = PagePool(NUM_PAGES)
        self.chats: list[Chat] = []

        make: Callable[[Decoder], DecodeGraphs] | None = None
        if capture is not None:

            def make(decoder: Decoder) -> DecodeGraphs:
                programs = None if device.type == "cuda" else 6
                return DecodeGraphs(
                    decoder, MAX_CONTEXT, NUM_PAGES, capture, max_rows=max_rows, programs=programs
                )

        gate = FixedGate(share)
        self.runner = ModelRunner(weights, self.cache, None, gate, make, prefix_kernel)

    def node(self, parent: PrefixNode | None, count: int, seed: int) -> PrefixNode:
        """A node of any length with its K/V; seed: of its ids."""
        path = self.path(parent)
        seq = Tokens(f"p-{seed}", random_ids(count, seed), sum(map(len, path)), IdDigest())
        node = PrefixNode(seq, parent or Root(f"p-{seed}", 0, IdDigest()))
        assert node.seq.reserve(count, self.pool)
        self.runner.run([], [Segment(node.seq, path, 0, count, False)])
        node.seq.num_computed = count
        return node

    @staticmethod
    def path(node: PrefixNode | None) -> Path:
        nodes: list[PrefixNode] = []
        while isinstance(node, PrefixNode):
            nodes.insert(0, node)
            node = node.parent if isinstance(node.parent, PrefixNode) else None
        return tuple(nodes)

    def join(self, node: PrefixNode | None, count: int, seed: int) -> None:
        """A chat behind a node, its prompt read and its first token chosen."""
        path = self.path(node)
        seq = Tokens(f"c-{seed}", random_ids(count, seed), sum(map(len, path)), IdDigest())
        assert seq.reserve(count, self.pool)
        _, logits = self.runner.run([], [Segment(seq, path, 0, count, True)])
        seq.ids.append(int(logits[0].argmax()))
        self.chats.append(Chat(seq, path))

    def leave(self, index: int) -> None:
        self.chats.pop(index).seq.release(self.pool)

    def step(self) -> Tensor:
        """Decode one token of each chat; its logits, in the order of the chats."""
        segments: dict[Segment, Chat] = {}
        for chat in self.chats:
            end = len(chat.seq)
            assert chat.seq.reserve(end, self.pool)
            segments[Segment(chat.seq, chat.path, end - 1, end, True)] = chat
        batch, logits = self.runner.run(list(segments), [])
        logits = logits.cpu().clone()
        rows = {id(segment.seq): row for row, segment in enumerate(batch.logit_segments)}
        for segment, chat in segments.items():
            chat.seq.num_computed = segment.end
            chat.seq.ids.append(int(logits[rows[id(chat.seq)]].argmax()))
        return logits[[rows[id(chat.seq)] for chat in self.chats]]

    def unwritten(self, held: Sequence[Tokens]) -> Tensor:
        """K/V of all slots that no token of these sequences lies in, the scratch page left out."""
        free = torch.ones(NUM_PAGES * PAGE_SIZE, dtype=torch.bool)
        for seq in held:
            offsets = torch.arange(len(seq))
            pages = torch.tensor(seq.page_ids)
            used = offsets[: len(pages) * PAGE_SIZE]
            free[pages[used // PAGE_SIZE] * PAGE_SIZE + used % PAGE_SIZE] = False
        return self.cache.kv[:, :, : NUM_PAGES * PAGE_SIZE].cpu()[:, :, free]
