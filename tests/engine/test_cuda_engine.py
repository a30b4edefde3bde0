"""The engine's choices for a CUDA device, on one that is really the CPU.

Weights, cache and kernels are the CPU's; what is the device's is all that the engine does otherwise
there: captured decode steps, a cache with a spare page, staging beside it, and measured memory.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import devices, loading
from engine.config import EngineConfig
from engine.cuda_graphs import DecodeGraphs
from engine.memory.kv_cache import KVCache
from engine.model.cuda_gate import sharing_seconds
from engine.model.model_config import read_model_config
from engine.model.sharing_gate import SharingGate
from engine.model.weight_loading import load_weights
from engine.profile.record import AttentionCosts
from kernels.prefix_choice import PrefixChoice, prefix_attention_torch
from kernels.triton_spans import AttentionShape
from tests.engine.harness import Harness, HarnessFactory, random_ids

PREFIX = random_ids(130, 1)


class _LateCopies:
    """Copies that hold nothing until they are waited for."""

    def __init__(self, device: object) -> None:
        pass

    @staticmethod
    def start(tensors: list[Tensor]) -> tuple[list[Tensor], Any]:
        sources = [tensor.clone() for tensor in tensors]
        copies = [torch.full_like(tensor, float("nan")) for tensor in tensors]

        def synchronize() -> None:
            for copy, source in zip(copies, sources, strict=True):
                copy.copy_(source)

        return copies, SimpleNamespace(synchronize=synchronize)


@pytest.fixture
def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = SimpleNamespace(type="cuda")

    class Cache(KVCache):
        def __init__(self, *sizes: Any) -> None:
            super().__init__(*sizes[:-1])
            self.kv[:, :, -64:] = float("nan")  # the spare page, until it is written

    monkeypatch.setattr(loading, "resolve_device", lambda name: fake)
    monkeypatch.setattr(loading, "KVCache", Cache)
    monkeypatch.setattr(
        loading, "load_weights", lambda *given, **how: load_weights(*given[:-1], **how)
    )
    chosen = PrefixChoice(prefix_attention_torch, triton_s=2e-3, torch_s=1e-3)
    monkeypatch.setattr(loading, "choose_prefix_kernel", lambda *sizes: chosen)
    monkeypatch.setattr(loading, "HostCopies", _LateCopies)
    monkeypatch.setattr(loading, "CudaCapture", lambda: lambda run: run)
    monkeypatch.setattr(loading, "DecodeGraphs", partial(DecodeGraphs, programs=6))


def _talk(harness: Harness) -> list[list[int]]:
    """Chats that come one after the other, two assistants, a chat that goes on."""
    requests = [harness.submit(random_ids(30, 10), chat="a", prefix=PREFIX, max_tokens=40)]
    for i in range(4):
        for _ in range(3 * i):
            harness.step()
        prefix = PREFIX if i % 2 else random_ids(70, 2)
        new = random_ids(50 + 7 * i, 20 + i)
        requests.append(harness.submit(new, chat=f"b{i}", prefix=prefix, max_tokens=10 + 9 * i))
    harness.run()
    return [harness.ids(request) for request in requests]


@pytest.mark.parametrize("share", ["always", "never"])
def test_captured_steps_answer_as_the_cpu_engine(
    make_engine: HarnessFactory, request: pytest.FixtureRequest, share: str
) -> None:
    expected = _talk(make_engine(share_prefix=share))
    request.getfixturevalue("pretend_cuda")
    harness = make_engine(share_prefix=share)
    assert _talk(harness) == expected
    graphs = harness.engine.runner.graphs
    assert graphs is not None
    assert graphs.replayed > 20
    assert not harness.engine.runner.decoder.cache.kv[:, :, -64:].isnan().any()  # warmed up
    pool = harness.engine.scheduler.pool
    assert harness.engine.runner.decoder.cache.k[0].shape[0] == (pool.num_pages + 1) * 64


def _converse(make_engine: HarnessFactory, disk: Path | None, method: str) -> list[list[int]]:
    """Chats that decode together, then come back to another engine; saved on disk if there is."""
    options: dict[str, Any] = {"disk": disk, "checkpoint_method": method} if disk else {}
    harness = make_engine(**options)
    news = [random_ids(30 + 40 * i, 10 + i) for i in range(3)]
    requests = [
        harness.submit(new, chat=f"c{i}", prefix=PREFIX, max_tokens=50)
        for i, new in enumerate(news)
    ]
    harness.run()
    answers = [harness.ids(request) for request in requests]
    make_engine.close(harness)
    harness = make_engine(**options)
    for i, (new, answer) in enumerate(zip(news, list(answers), strict=True)):
        history = new + answer
        request = harness.submit(
            random_ids(9, 20 + i), chat=f"c{i}", prefix=PREFIX, history=history,
            computed=len(history) - 1,
        )  # fmt: skip
        harness.run()
        answers.append(harness.ids(request))
        if disk:
            stats = harness.done(request).stats
            assert (stats.restored_tokens, stats.recomputed_tokens) == (len(history) - 1, 0)
            assert stats.prefix_restored_tokens == (len(PREFIX) if i == 0 else 0)
    if disk:
        assert harness.engine.stats().stripes_dropped == 0
    return answers


@pytest.mark.parametrize("method", ["hidden", "kv"])
def test_what_captured_steps_saved_is_restored(
    make_engine: HarnessFactory, request: pytest.FixtureRequest, tmp_path: Path, method: str
) -> None:
    """Staged on the device, copied beside the steps, read by the writer when the copy is there."""
    expected = _converse(make_engine, None, method)
    request.getfixturevalue("pretend_cuda")
    assert _converse(make_engine, tmp_path, method) == expected


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="finds no CUDA device"):
        devices.resolve_device("cuda")
    assert devices.resolve_device("auto") == torch.device("cpu")


def test_memory_for_kv(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As set; else 1 GiB on the CPU, and on a device what is free but weights and a reserve."""
    geometry = read_model_config(tiny_model)
    config = EngineConfig(model_dir="", model_name="", kv_memory_bytes=0)
    given = EngineConfig(model_dir="", model_name="", kv_memory_bytes=77)
    cuda: Any = SimpleNamespace(type="cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 << 30, 20 << 30))
    weights = load_weights(tiny_model, geometry, torch.float32, 64)
    one = weights.layers[0]
    parts: list[Any] = [one.qkv, one.o, one.gate_up, one.down]
    each = sum(p.in_features * p.out_features for p in parts) + 2 * geometry.hidden_size
    rest = 2 * geometry.vocab_size * geometry.hidden_size + geometry.hidden_size
    num_bytes = 4 * (geometry.num_layers * each + rest)
    expected = int(0.9 * (10 << 30)) - num_bytes - (1 << 30)
    memory = devices.kv_memory_bytes
    assert memory(given, geometry, torch.float32, cuda) == 77
    assert memory(config, geometry, torch.float32, torch.device("cpu")) == 1 << 30
    assert memory(config, geometry, torch.float32, cuda) == expected


def test_sharing_is_measured_both_ways() -> None:
    """A table from the times of both ways, each run as it would be in a step."""
    sizes: list[int] = []

    def seconds(calls: Any) -> float:
        for call in calls:
            call()
        decode, groups = calls[0].args[3:5]
        sizes.append(decode.host.num_keys.sum() + (groups.host.num_keys.sum() if groups else 0))
        return float(sizes[-1])

    shape = AttentionShape(4, 2, 64, torch.float32)
    rows, tokens = (2, 4), (64, 130)
    shared, own = sharing_seconds(shape, torch.device("cpu"), rows, tokens, seconds, programs=4)
    assert shared == ((64 + 2 * 64, 130 + 2 * 64), (64 + 4 * 64, 130 + 4 * 64))
    assert own == ((2 * 128, 2 * 194), (4 * 128, 4 * 194))
    gate = SharingGate(AttentionCosts(rows=rows, tokens=tokens, shared_s=shared, own_s=own))
    assert gate.shares(130, 4)
