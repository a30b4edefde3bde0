"""A tiny random model, an engine that is stepped by hand, and transformers as the oracle."""

from __future__ import annotations

import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine.config import EngineConfig
from engine.engine import Engine
from engine.messages import Delta, Done, Failed, FromEngine, SamplingParams, Status, Submit
from sessions.chunks import ChunkStore

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tokenizer(model_dir: Path) -> int:
    """A byte-level tokenizer without merges; returns the size of its vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
    }
    (model_dir / "tokenizer_config.json").write_text(json.dumps(config))
    return len(vocab)


def make_tiny_model(
    model_dir: Path, *, num_kv_heads: int, seed: int = 0, family: str = "Llama", **options: Any
) -> Path:
    """A random model of three layers whose greedy choices rest on no tie."""
    import transformers

    model_dir.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(model_dir)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=num_kv_heads,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        **options,
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # ones would hide a norm that is applied twice
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif "bias" in name:  # and zeros a bias that is left out
            torch.nn.init.normal_(parameter, std=0.3)
    model.lm_head.weight.data *= 8  # logits as wide apart as a trained model's
    model.save_pretrained(model_dir)
    return model_dir


def random_ids(count: int, seed: int) -> list[int]:
    """Ordinary token ids, none of them special."""
    return random.Random(seed).choices(range(3, 259), k=count)


@dataclass
class Harness:
    """An engine, and everything that it said."""

    engine: Engine
    store: ChunkStore | None
    events: list[FromEngine]
    serial: int = 0

    def submit(
        self,
        new: list[int],
        *,
        chat: str = "a",
        prefix: list[int] | None = None,
        scope: str = "",
        history: list[int] | None = None,
        computed: int | None = None,
        candidate: int = 0,
        saves: bool = True,
        **sampling: Any,
    ) -> str:
        self.serial += 1
        request_id = f"r{self.serial}"
        history = history or []
        params = {"temperature": 0.0, "max_tokens": 12, **sampling}
        self.engine.handle(
            Submit(
                request_id=request_id,
                chat_id=chat,
                prefix_ids=prefix or [],
                prefix_scope=scope,
                candidate=candidate,
                saves=saves,
                history_ids=history,
                history_computed=len(history) if computed is None else computed,
                new_ids=new,
                sampling=SamplingParams(**params),
            )
        )
        return request_id

    def step(self) -> None:
        self.engine.step()
        self.engine.scheduler.check()

    def run(self) -> None:
        """Step until nothing is left to do; by the clock, as steps beside a read do nothing."""
        deadline = time.monotonic() + 120
        while self.engine.has_work():
            assert time.monotonic() < deadline, "work is left after 120 s"
            self.step()

    def ids(self, request_id: str) -> list[int]:
        """Sampled ids so far."""
        deltas = [e for e in self.events if isinstance(e, Delta) and e.request_id == request_id]
        return [token for delta in deltas for token in delta.token_ids]

    def text(self, request_id: str) -> str:
        deltas = [e for e in self.events if isinstance(e, Delta) and e.request_id == request_id]
        return "".join(delta.text for delta in deltas)

    def done(self, request_id: str) -> Done:
        ends = [
            e for e in self.events if isinstance(e, Done | Failed) and e.request_id == request_id
        ]
        assert len(ends) == 1, f"{request_id} ended {len(ends)} times: {ends}"
        assert isinstance(ends[0], Done), ends[0]
        return ends[0]

    def failed(self, request_id: str) -> Failed:
        ends = [e for e in self.events if isinstance(e, Failed) and e.request_id == request_id]
        assert len(ends) == 1
        return ends[0]

    def statuses(self, request_id: str) -> list[Status]:
        return [e for e in self.events if isinstance(e, Status) and e.request_id == request_id]

    def close(self) -> None:
        self.engine.close()
        if self.store is not None:
            self.store.close()


class HarnessFactory:
    """Makes engines, and closes them when the test ends."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.made: list[Harness] = []

    def __call__(self, *, disk: Path | None = None, **config: Any) -> Harness:
        defaults: dict[str, Any] = {
            "model_dir": str(self.model_dir),
            "model_name": "tiny",
            "dtype": "fp32",
            "kv_memory_bytes": 64 << 20,
            "num_threads": len(os.sched_getaffinity(0)),
        }
        store = None
        if disk is not None:
            disk.mkdir(parents=True, exist_ok=True)
            store = ChunkStore([disk], cap_bytes=1 << 30)
        events: list[FromEngine] = []
        engine = Engine(EngineConfig(**{**defaults, **config}), store, events.append)
        harness = Harness(engine, store, events)
        self.made.append(harness)
        return harness

    def close(self, harness: Harness) -> None:
        self.made.remove(harness)
        harness.close()


class Oracle:
    """transformers' own generation, fp32, and how decided each choice was."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def greedy(self, prompt: list[int], max_tokens: int, eos: int = 2) -> list[int]:
        """Greedy ids without the end-of-turn token; fails when a choice is nearly a tie."""
        ids, gap = self.choices(prompt, max_tokens, eos)
        assert gap > 5e-3, f"the oracle's choice is nearly a tie ({gap}); take other ids"
        return ids

    @torch.inference_mode()
    def choices(self, prompt: list[int], max_tokens: int, eos: int = 2) -> tuple[list[int], float]:
        """Greedy ids, and the smallest gap between the two best logits of any of them."""
        generated = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=eos,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = [torch.topk(logits[0], 2).values for logits in generated.logits]
        ids: list[int] = generated.sequences[0, len(prompt) :].tolist()
        gap = min(float(first - second) for first, second in best)
        return ids[:-1] if ids and ids[-1] == eos else ids, gap
