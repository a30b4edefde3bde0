"""The same decode steps by transformers: its model, its DynamicCache, as its users run it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.decoding import Decoding

ATTENTIONS = ("sdpa", "eager")  # of its own, those that run on every CPU


class TransformersSide:
    """Owns transformers' model and, for one batch at a time, its cache."""

    def __init__(self, model_dir: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
        self._model.eval()
        self._cache: Any = None
        self.attention = ""  # the one in use

    @torch.inference_mode()
    def last_logits(self, ids: list[int]) -> Tensor:
        """fp32 logits [1, vocab_size] after a whole prompt, which it computes by itself."""
        output = self._model(torch.tensor([ids]), use_cache=False, logits_to_keep=1)
        logits: Tensor = output.logits[:, -1].float()
        return logits

    @torch.inference_mode()
    def begin(self, decoding: Decoding, batch: int) -> None:
        """Take over prefix and suffixes of the first `batch` rows.

        The cache is filled with our K/V (checked by `last_logits`), which spares its prefill.
        """
        from transformers import DynamicCache

        self._cache = DynamicCache()
        sequences = decoding.sequences[:batch]
        suffix = torch.stack([decoding.kv_of(s, s.num_computed) for s in sequences], dim=2)
        prefix = None
        if decoding.node is not None:
            prefix = decoding.kv_of(decoding.node.seq, decoding.prefix)
        for layer in range(decoding.config.num_layers):
            k, v = suffix[layer]
            if prefix is not None:
                shape = (batch, *prefix.shape[2:])
                k = torch.cat([prefix[layer, 0].expand(shape), k], dim=2)
                v = torch.cat([prefix[layer, 1].expand(shape), v], dim=2)
            self._cache.update(k.contiguous(), v.contiguous(), layer)

    def choose_attention(self, tokens: list[int]) -> None:
        """Go on with the attention that runs a step of this batch fastest; nothing advances."""
        seconds = {}
        for name in ATTENTIONS:
            self._model.set_attn_implementation(name)
            seconds[name] = self.step(tokens)[0]
            self._cache.crop(-1)
        self.attention = min(seconds, key=seconds.__getitem__)
        self._model.set_attn_implementation(self.attention)

    @torch.inference_mode()
    def step(self, tokens: list[int]) -> tuple[float, Tensor]:
        """Run one token a row; seconds (with the greedy choice) and fp32 logits."""
        began = time.perf_counter()
        output = self._model(torch.tensor(tokens)[:, None], cache=self._cache, use_cache=True)
        logits: Tensor = output.logits[:, -1]
        logits.argmax(-1).tolist()
        return time.perf_counter() - began, logits.float()

    def end(self) -> None:
        """Give the cache's memory back."""
        self._cache = None
