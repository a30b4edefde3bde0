"""Decoding behind one shared prefix on a CUDA device: shared, unshared, and flash attention.

All sides run the same weights through the same layers, as captured graphs, and choose a token for
each row at each step. `shared` and `unshared` are the engine's runner on its paged cache, with
lengths that grow; `flash` is torch's flash attention over keys that lie in one piece for each
sequence, the prefix repeated in each, with a length that stays. K and V are random: speed does not
depend on them.
"""

from __future__ import annotations

import random
import time
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_lab import Lab
from benchmarks.gpu_model import random_weights, weight_bytes
from engine.batch import Batch, Segment
from engine.cuda_graphs import DecodeGraphs
from engine.memory.kv_cache import KVCache
from engine.memory.page_pool import PAGE_SIZE, PagePool, pages_for
from engine.memory.prefix_tree import PrefixNode, Root
from engine.memory.sequence import IdDigest, Sequence
from engine.model.attention import FixedGate
from engine.model.decoder import Decoder
from engine.model.geometry import ModelConfig
from engine.model.weights import Weights
from engine.model_runner import ModelRunner

SUFFIX = 16  # private tokens of a row at first
MAX_SUFFIX = PAGE_SIZE
SPARE_BYTES = 6 << 30  # for logits, graphs and what the kernels keep


class Steps:
    """Owns a cache, a prefix and a batch of sequences below it. One thread."""

    def __init__(self, lab: Lab, weights: Weights, max_prefix: int, max_batch: int) -> None:
        c = weights.config
        self.lab, self.weights = lab, weights
        self.num_pages = pages_for(max_prefix) + max_batch
        self.cache = KVCache(
            c.num_layers,
            self.num_pages + 1,  # the last takes what left-over rows of a graph write
            c.num_kv_heads,
            c.head_dim,
            weights.dtype,
            lab.device,
        )
        self.cache.kv.normal_()
        self.runners = {
            "shared": self._runner(True, max_batch),
            "unshared": self._runner(False, max_batch),
        }

    def _runner(self, share: bool, max_batch: int) -> ModelRunner:
        def make(decoder: Decoder) -> DecodeGraphs:
            context = self.weights.config.max_position_embeddings
            lab = self.lab
            return DecodeGraphs(
                decoder,
                context,
                self.num_pages,
                lab.capture(),
                max_rows=max_batch,
                programs=lab.programs,
            )

        return ModelRunner(self.weights, self.cache, None, FixedGate(share), make)

    def begin(self, prefix: int, batch: int) -> None:
        """A prefix and that many rows with SUFFIX tokens, the last of which is to be run."""
        draw = random.Random(0)
        vocab = range(self.weights.config.vocab_size)
        pool = PagePool(self.num_pages)
        seq = Sequence("p", draw.choices(vocab, k=prefix), 0, IdDigest())
        assert seq.reserve(prefix, pool), "no room for the prefix"
        seq.num_computed = prefix
        self.node = PrefixNode(seq, Root("p", 0, IdDigest()))
        self.sequences = []
        for row in range(batch):
            own = Sequence(f"c-{row}", draw.choices(vocab, k=SUFFIX), prefix, IdDigest())
            assert own.reserve(MAX_SUFFIX, pool), "no room for a row"
            self.sequences.append(own)

    def step(self, side: str) -> tuple[float, Tensor]:
        """Run each row's last token and choose the next: seconds, and logits in the rows' order."""
        began = time.perf_counter()
        segments = [
            Segment(seq, (self.node,), len(seq) - 1, len(seq), True) for seq in self.sequences
        ]
        _, logits = self.runners[side].run(segments, [])
        tokens = logits.argmax(-1).tolist()
        for seq, token in zip(self.sequences, tokens, strict=True):
            seq.ids.append(token)
        return time.perf_counter() - began, logits

    def rewind(self) -> None:
        """Back to SUFFIX tokens of each row."""
        for seq in self.sequences:
            del seq.ids[SUFFIX:]

    def graphs_used(self, side: str) -> int:
        """Steps of a side that were replays of a graph."""
        graphs = self.runners[side].graphs
        assert graphs is not None, "a runner without graphs"
        return graphs.replayed


class FlashSide:
    """Owns a cache in which each sequence's keys lie in one piece, and one captured step.

    With `one_layer` all layers use the memory of one: as many bytes are read, from memory as well,
    as a layer's K/V are several times as large as any cache.
    """

    def __init__(self, steps: Steps, one_layer: bool) -> None:
        lab, weights = steps.lab, steps.weights
        c, batch = weights.config, len(steps.sequences)
        self.length = len(steps.node) + SUFFIX
        self.room = pages_for(self.length) * PAGE_SIZE
        layers = 1 if one_layer else c.num_layers
        self.cache = KVCache(
            layers, batch * self.room // PAGE_SIZE, c.num_kv_heads, c.head_dim, weights.dtype,
            lab.device,
        )  # fmt: skip
        if one_layer:
            self.cache.kv.normal_()
            self.cache.k, self.cache.v = (x * c.num_layers for x in (self.cache.k, self.cache.v))
        else:
            self._copy(steps)
        rows = torch.arange(batch, device=lab.device)
        ids = torch.tensor([seq.ids[SUFFIX - 1] for seq in steps.sequences], device=lab.device)
        self.batch = Batch(
            segments=(),
            first_rows=(),
            num_decode=batch,
            token_ids=ids,
            positions=torch.full_like(rows, self.length - 1),
            slots=rows * self.room + self.length - 1,
            logit_rows=rows,
            logit_segments=(),
        )
        self.decoder = Decoder(weights, self.cache)
        self.is_cuda = lab.is_cuda
        self.logits = torch.empty(0)
        self.chosen = torch.empty(batch, dtype=torch.int64, device=lab.device)
        self.replay = lab.capture()(self._run)

    @staticmethod
    def bytes_needed(steps: Steps, prefix: int, batch: int, num_layers: int) -> int:
        """Of the cache."""
        c = steps.weights.config
        per_page = KVCache.bytes_per_page(num_layers, c.num_kv_heads, c.head_dim, steps.lab.dtype)
        return batch * pages_for(prefix + SUFFIX) * per_page

    def step(self) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        self.replay()
        self.chosen.tolist()
        return time.perf_counter() - began

    def _copy(self, steps: Steps) -> None:
        """The rows' K/V out of the paged cache."""
        source, target = steps.cache.kv, self.cache.kv
        prefix = len(steps.node)
        node_slots = _slots(steps.node.seq.page_ids, prefix, source.device)
        for row, seq in enumerate(steps.sequences):
            own = _slots(seq.page_ids, SUFFIX, source.device)
            first = row * self.room
            target[:, :, first : first + prefix] = source[:, :, node_slots]
            target[:, :, first + prefix : first + prefix + SUFFIX] = source[:, :, own]

    def _run(self) -> None:
        self.logits = self.decoder.forward(self.batch, self._attend, None)
        torch.argmax(self.logits, dim=-1, out=self.chosen)

    def _attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, result: Tensor) -> None:
        shape = (len(q), self.room, *k_cache.shape[1:])
        k, v = (x.view(shape)[:, : self.length].transpose(1, 2) for x in (k_cache, v_cache))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self.is_cuda else nullcontext():
            out = scaled_dot_product_attention(
                q[:, :, None], k, v, enable_gqa=q.shape[1] != k.shape[1]
            )
        result.copy_(out[:, :, 0])


def _slots(page_ids: list[int], count: int, device: torch.device) -> Tensor:
    offsets = torch.arange(count)
    slots = torch.tensor(page_ids)[offsets // PAGE_SIZE] * PAGE_SIZE + offsets % PAGE_SIZE
    return slots.to(device)


def fitting_layers(lab: Lab, config: ModelConfig, max_prefix: int, max_batch: int) -> int:
    """How many of the model's layers fit in the device's memory, with our cache."""
    pages = pages_for(max_prefix) + max_batch + 1
    one = replace(config, num_layers=1)
    fixed = weight_bytes(replace(config, num_layers=0), lab.dtype.itemsize)
    each = weight_bytes(one, lab.dtype.itemsize) - fixed
    each += pages * KVCache.bytes_per_page(1, config.num_kv_heads, config.head_dim, lab.dtype)
    spare = SPARE_BYTES if lab.is_cuda else 0
    return max(0, min(config.num_layers, (lab.free_bytes() - spare - fixed) // each))


def make_weights(lab: Lab, config: ModelConfig) -> Weights:
    """Random, on the device; in fp32 with wider spread, so that tiny models choose clearly."""
    return random_weights(config, lab.dtype, lab.device, std=0.02 if lab.is_cuda else 0.2)
