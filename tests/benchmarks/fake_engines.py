"""Stand-ins for OpenVINO GenAI, which runs transformers, and for `llama-batched-bench`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from benchmarks.openvino_worker import Worker
from engine.model.model_config import read_model_config

Choose = Callable[[list[int]], int]  # the token after these

# Prints what the real one prints (llama.cpp b11434), at 5 ms a step, 10 ms without a unified cache.
LLAMA_BENCH = """#!{python}
import json, os, sys
arguments = sys.argv[1:]
if "--version" in arguments:
    sys.exit("version: 11434 (0a1f017)")
with open(__file__ + ".log", "a") as log:
    print(json.dumps(arguments), file=log)
unified = "--kv-unified" in arguments
if unified and {old}:
    sys.exit("error: invalid argument: --kv-unified")
said = {{arguments[i]: arguments[i + 1] for i in range(len(arguments) - 1)}}
pp, tg, pl, cells = (int(said[key]) for key in ("-npp", "-ntg", "-npl", "-c"))
assert said["--output-format"] == "jsonl" and "-pps" in arguments
needed = (pp if unified else pl * pp) + pl * tg
print("llama_context: n_ctx = %d" % cells, file=sys.stderr)
seconds = tg * (0.005 if unified else 0.010)
if needed <= cells:
    print('{{"n_kv_max": %d, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, '
          '"is_pp_shared": {shared}, "n_gpu_layers": -1, "n_threads": %s, "n_threads_batch": %s, '
          '"pp": %d, "tg": %d, "pl": %d, "n_kv": %d, "t_pp": 0.101000, "speed_pp": %f, '
          '"t_tg": %f, "speed_tg": %f, "t": %f, "speed": %f}}' % (
              cells, said["-t"], said["-tb"], pp, tg, pl, needed, pp / 0.101, seconds,
              pl * tg / seconds, seconds + 0.101, (pp + pl * tg) / (seconds + 0.101)))
print()
"""


def write_llama_bench(path: Path, *, old: bool = False, shared: int = 1) -> Path:
    """An executable; `old`: one that knows no kinds of cache."""
    path.write_text(LLAMA_BENCH.format(python=sys.executable, old=old, shared=shared))
    path.chmod(0o755)
    return path


def llama_calls(path: Path) -> list[list[str]]:
    """The arguments of its runs so far."""
    return [json.loads(line) for line in Path(f"{path}.log").read_text().splitlines()]


def write_gguf(path: Path, model_dir: Path, **changed: int) -> Path:
    """A GGUF file with the model's geometry and one of its tensors."""
    config = read_model_config(model_dir)
    values = {
        "block_count": config.num_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        **changed,
    }
    writer = GGUFWriter(path, "llama")
    for name, value in values.items():
        writer.add_uint32(f"llama.{name}", value)
    embedding = np.zeros((config.vocab_size, config.hidden_size), dtype=np.float16)
    writer.add_tensor("token_embd.weight", embedding)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def choice_of(model_dir: Path) -> Choose:
    """The greedy choice of transformers, without a cache."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)

    @torch.inference_mode()
    def choose(ids: list[int]) -> int:
        return int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())

    return choose


class _Pipeline:
    """Begins two requests a step."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose
        self.requests: list[SimpleNamespace] = []

    def add_request(self, number: int, ids: list[int], config: SimpleNamespace) -> Any:
        assert config.ignore_eos
        assert not config.do_sample
        request = SimpleNamespace(ids=ids, left=config.max_new_tokens, begun=False, unread=[])
        self.requests.append(request)

        def read() -> dict[int, SimpleNamespace]:
            unread, request.unread = request.unread, []
            return {number: SimpleNamespace(generated_ids=unread)}

        return SimpleNamespace(can_read=lambda: bool(request.unread), read=read)

    def has_non_finished_requests(self) -> bool:
        return any(request.left for request in self.requests)

    def step(self) -> None:
        for request in [r for r in self.requests if not r.begun][:2]:
            request.begun = True
        for request in self.requests:
            if request.begun and request.left:
                token = self.choose(request.ids)
                request.ids.append(token)
                request.unread.append(token)
                request.left -= 1


def inject_openvino(monkeypatch: pytest.MonkeyPatch, choose: Choose) -> None:
    """Put the modules where imports find them."""
    modules = {name: ModuleType(name) for name in ("openvino", "openvino_genai")}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)

    def pipeline(gguf: str, scheduler: Any, device: str, properties: dict[str, Any]) -> _Pipeline:
        assert Path(gguf).is_file()
        assert scheduler.enable_prefix_caching
        assert scheduler.cache_size >= 1  # GB
        assert device == "CPU"
        assert properties["INFERENCE_NUM_THREADS"] == torch.get_num_threads()
        return _Pipeline(choose)

    vars(modules["openvino"])["Tensor"] = lambda array: [int(i) for i in array[0]]
    vars(modules["openvino_genai"]).update(
        SchedulerConfig=SimpleNamespace,
        GenerationConfig=SimpleNamespace,
        ContinuousBatchingPipeline=pipeline,
        __version__="1.2.3",
    )


class InProcess:
    """In place of the child process's `Popen`: the same worker, here."""

    def __init__(self, command: list[str], **_: object) -> None:
        gguf, threads, cache_gb = command[-3:]
        worker = Worker(gguf, int(threads), int(cache_gb))
        lines = [json.dumps({"version": worker.version})]
        self.stdin = SimpleNamespace(
            write=lambda line: lines.append(json.dumps(worker.answer(line))),
            flush=lambda: None,
            close=lambda: None,
        )
        self.stdout = SimpleNamespace(readline=lambda: lines.pop(0), close=lambda: None)

    def wait(self, timeout: float) -> int:
        return 0
