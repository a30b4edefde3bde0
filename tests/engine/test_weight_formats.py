"""Formats of weights: the numbers they stand for, what is measured of them, and which is taken."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.model.model_config import read_model_config
from engine.model.weight_loading import load_weights, open_tensors
from engine.model.weights import Weights
from engine.profile import choice, machine
from engine.profile.formats import measure_formats
from engine.profile.weight_figures import FormatFigures, WeightFigures, WeightFormat
from kernels.quantised import QuantisedLinear, eight_bit_grid, four_bit_grid
from tests.engine.harness import HarnessFactory, make_tiny_model, random_ids


@pytest.fixture(scope="module")
def four_bit_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with each projection on a 4-bit grid, as an imported Q4_1 file has."""
    model_dir = make_tiny_model(tmp_path_factory.mktemp("four"), num_kv_heads=2)
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "proj" in name:
            groups = tensor.view(len(tensor), -1, 32)
            low = groups.amin(-1).half().float()[..., None]
            scale = ((groups.amax(-1, keepdim=True) - low) / 15).half().float()
            codes = ((groups - low) / scale).round().clamp(0, 15)
            tensors[name] = (codes * scale + low).flatten(1)
    save_file(tensors, path, metadata={"format": "pt"})
    return model_dir


def load(model_dir: Path, format: WeightFormat | None, dtype: torch.dtype) -> Weights:
    return load_weights(model_dir, read_model_config(model_dir), dtype, 256, format=format)


def test_int4_stands_for_the_file_s_own_numbers(four_bit_model: Path) -> None:
    """A layer's products are those of the fp32 weights, but for the rounding of the inputs."""
    plain, four = (load(four_bit_model, f, torch.float32) for f in ("fp32", "int4"))
    for one, two in zip(plain.layers, four.layers, strict=True):
        for name in ("qkv", "kv", "o", "gate_up", "down"):
            exact, ours = getattr(one, name), getattr(two, name)
            assert isinstance(ours, QuantisedLinear)
            assert ours.bits == 4
            # numbers that 8 bits hold: each a 127th of its group's largest
            x = torch.randint(-127, 128, (5, ours.in_features)).float()
            x.view(5, -1, 32)[..., 0] = 127
            difference = ours(x) - exact(x)
            assert difference.abs().max() < 2e-5 * exact(x).abs().max()


def test_what_was_not_rounded_to_four_bits_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ModelError, match="int8 is possible"):
        load(tiny_model, "int4", torch.float32)


def test_a_format_is_part_of_the_fingerprint(four_bit_model: Path) -> None:
    formats: list[WeightFormat] = ["fp32", "int8", "int4"]
    loaded = {load(four_bit_model, format, torch.float32).fingerprint for format in formats}
    again = load(four_bit_model, "int4", torch.float32).fingerprint
    assert len(loaded) == 3
    assert again in loaded


@pytest.mark.parametrize("family", ["Olmo2", "Qwen2", "Qwen3"])
def test_every_family_runs_in_eight_bits(tmp_path: Path, family: str) -> None:
    """Logits of one prompt, as a whole and token by token, near those in fp32."""
    model_dir = make_tiny_model(tmp_path / family, num_kv_heads=2, family=family)
    config = read_model_config(model_dir)
    figures = measure_formats(
        open_tensors(model_dir, config), config, random_ids(200, 1), torch.float32, rows=(1,)
    )
    assert [one.format for one in figures.formats] == ["fp32", "int8"]
    assert figures.formats[0].agreement == 1.0
    assert figures.formats[0].loss == figures.fp32_loss
    assert figures.formats[1].agreement > 0.9
    assert abs(figures.rise(figures.formats[1])) < 0.02


def test_measuring_tells_a_bad_format_from_a_good_one(
    four_bit_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_model_config(four_bit_model)
    get = open_tensors(four_bit_model, config)
    ids = random_ids(200, 2)
    good = measure_formats(get, config, ids, torch.float32, rows=(1, 4))
    assert [one.format for one in good.formats] == ["fp32", "int8", "int4"]
    assert all(0 < s < 10 for one in good.formats for s in one.step_s)
    assert 0 < good.undisturbed <= 1.05
    assert good.formats[2].num_bytes < good.formats[1].num_bytes < good.formats[0].num_bytes
    assert good.formats[2].agreement > 0.9

    def coarse(weight: torch.Tensor) -> object:
        step = weight.abs().amax() / 2
        return eight_bit_grid((weight / step).round() * step)

    monkeypatch.setattr("engine.model.quantising.eight_bit_grid", coarse)
    bad = measure_formats(get, config, ids, torch.float32, rows=(1,))
    assert bad.formats[1].agreement < 0.7
    assert bad.formats[2].agreement < good.formats[2].agreement  # its head


def figures_of(format: WeightFormat, loss: float, agreement: float, *ms: float) -> FormatFigures:
    return FormatFigures(
        format=format,
        loss=loss,
        agreement=agreement,
        step_s=tuple(value / 1e3 for value in ms),
        num_bytes=1,
    )


PLAIN = figures_of("bf16", 3.001, 0.98, 20, 20, 40)


@pytest.mark.parametrize(
    ("int8", "int4", "taken"),
    [
        (
            figures_of("int8", 3.01, 0.96, 8, 12, 25),
            figures_of("int4", 3.01, 0.96, 4, 10, 25),
            "int4",
        ),
        (
            figures_of("int8", 3.01, 0.96, 8, 12, 25),
            figures_of("int4", 3.02, 0.96, 4, 10, 25),
            "int8",
        ),
        (
            figures_of("int8", 3.01, 0.96, 8, 12, 25),
            figures_of("int4", 3.01, 0.94, 4, 10, 25),
            "int8",
        ),
        (
            figures_of("int8", 3.01, 0.96, 8, 12, 25),
            figures_of("int4", 3.01, 0.96, 4, 10, 45),
            "int8",
        ),
        (
            figures_of("int8", 3.02, 0.96, 8, 12, 25),
            figures_of("int4", 3.00, 0.90, 4, 10, 20),
            "bf16",
        ),
        (figures_of("int8", 3.00, 0.99, 21, 21, 42), figures_of("int4", 3.0, 0.9, 9, 9, 9), "bf16"),
    ],
)
def test_what_auto_takes(int8: FormatFigures, int4: FormatFigures, taken: str) -> None:
    """The fastest that loses at most 0.5 % and agrees on 95 %; never one slower than the dtype."""
    figures = WeightFigures(
        fp32_loss=3.0, tokens=1000, rows=(1, 8, 32), formats=(PLAIN, int8, int4)
    )
    assert figures.best().format == taken
    lines = figures.lines()
    assert len(lines) == 3
    assert [line.endswith("taken") for line in lines].count(True) == 1


def test_auto_measures_once_and_says_so(
    four_bit_model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset(("avx512_vnni", "avx512_bf16")))
    config = EngineConfig(
        model_dir=str(four_bit_model),
        model_name="tiny",
        profile_path=str(tmp_path / "profile.json"),
    )
    geometry = read_model_config(four_bit_model)
    shares = iter((0.5, 1.0))  # of the timing that other programs leave

    def beside_others(*arguments: Any) -> WeightFigures:
        return msgspec.structs.replace(measure_formats(*arguments), undisturbed=next(shares))

    monkeypatch.setattr(choice, "measure_formats", beside_others)
    with caplog.at_level(logging.INFO):
        choice.choose_format(config, geometry, False)
        chosen = choice.choose_format(config, geometry, False)  # the first one was disturbed
    assert list(shares) == []
    assert "measuring formats" in caplog.text
    assert "int4: loss" in caplog.text

    def never(*arguments: object) -> WeightFigures:
        raise AssertionError("measured twice")

    monkeypatch.setattr(choice, "measure_formats", never)
    assert choice.choose_format(config, geometry, False) == chosen
    path = four_bit_model / "model.safetensors"
    path.touch()  # weights swapped under the same name
    with pytest.raises(AssertionError, match="twice"):
        choice.choose_format(config, geometry, False)


@pytest.mark.parametrize(
    ("weights", "dtype", "flags", "profile", "expected"),
    [
        ("auto", "fp32", "avx512_vnni", "p", "fp32"),  # exact is asked for
        ("auto", "bf16", "avx512_vnni", "", "bf16"),  # nothing may be measured
        ("auto", "bf16", "avx2", "p", "bf16"),  # products of bytes are slow here
        ("auto", "auto", "avx2", "p", "fp32"),
        ("auto", "bf16", "avx512_vnni", "p", None),
        ("int8", "fp32", "avx2", "p", "int8"),
        ("bf16", "bf16", "avx2", "", "bf16"),
    ],
)
def test_what_needs_no_measuring(
    monkeypatch: pytest.MonkeyPatch,
    weights: str,
    dtype: str,
    flags: str,
    profile: str,
    expected: str | None,
) -> None:
    monkeypatch.setattr(machine, "cpu_flags", lambda: frozenset((flags,)))
    config = EngineConfig(model_dir="", model_name="", profile_path=profile)
    config = msgspec.structs.replace(config, weights=weights, dtype=dtype)
    assert machine.format_without_figures(config) == expected


def test_weights_that_are_not_the_dtype_are_refused() -> None:
    config = EngineConfig(model_dir="", model_name="", weights="bf16", dtype="fp32")
    with pytest.raises(ValueError, match="bf16"):
        machine.format_without_figures(config)


def test_greedy_ids_do_not_depend_on_the_batch(four_bit_model: Path) -> None:
    """With fp32 activations and 4-bit weights: each answer alone and beside seven others."""
    factory = HarnessFactory(four_bit_model)
    harness = factory(weights="int4")
    prompts = [random_ids(20 + 3 * i, i) for i in range(8)]
    try:
        alone = []
        for i, prompt in enumerate(prompts):
            request = harness.submit(prompt, chat=f"alone{i}")
            harness.run()
            alone.append(harness.ids(request))
        requests = [harness.submit(p, chat=f"batch{i}") for i, p in enumerate(prompts)]
        harness.run()
        assert [harness.ids(request) for request in requests] == alone
    finally:
        harness.close()


def test_a_grid_survives_the_import(embedded_model: Path) -> None:
    """The embedded model in fp32 still holds the grid of its Q4_1 file, and of its Q8_0 head."""
    config = read_model_config(embedded_model)
    get = open_tensors(embedded_model, config)
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
        assert four_bit_grid(get(f"model.layers.11.{part}.weight")) is not None
    head = get("model.embed_tokens.weight")[:4096]
    assert torch.equal(eight_bit_grid(head).weight(), head)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_not_finite_is_refused(
    tmp_path: Path, value: float, name: str, dtype: torch.dtype
) -> None:
    """Wherever it is in a tensor, in each dtype that a file may have."""
    model_dir = make_tiny_model(tmp_path, num_kv_heads=2)
    path = model_dir / "model.safetensors"
    tensors = {key: tensor.to(dtype) for key, tensor in load_file(path).items()}
    tensors[name][-1, 3] = value
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"damaged: {name} has values not finite"):
        load(model_dir, "fp32", torch.float32)
