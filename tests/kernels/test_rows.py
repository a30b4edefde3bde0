"""Norms, activation and packed projections against their references and transformers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import compile_cache, reference
from kernels.elementwise import add_rms_norm, rms_norm, silu_mul
from kernels.linear import PackedLinear
from tests.kernels.tolerances import DTYPES, LINEAR, ROWS, assert_close


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("width", [16, 576, 2048])
def test_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    weight = (torch.rand(width) + 0.5).to(dtype)
    x, residual = (torch.randn(rows, width).to(dtype) * 4 for _ in range(2))
    total = x + residual
    out = torch.full_like(x, float("nan"))
    assert rms_norm(x, weight, 1e-5, out) is out
    assert_close(out, reference.rms_norm(x, weight, 1e-5), ROWS[dtype])
    wide = torch.cat([x, x], dim=1)[:, :width]  # a row stride of its own
    assert torch.equal(rms_norm(wide, weight, 1e-5), out)
    normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert_close(normed, reference.rms_norm(total, weight, 1e-5), ROWS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(576, eps=1e-5).to(dtype)
    x = torch.randn(9, 576).to(dtype)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        assert_close(rms_norm(x, norm.weight.detach(), 1e-5), norm(x), ROWS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_silu_mul(rows: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(rows, 3072) * 3).to(dtype)
    gate_up[0, :4] = torch.tensor([-200.0, -90.0, 0.0, 200.0])
    expected = reference.silu_mul(gate_up)
    difference = (silu_mul(gate_up).float() - expected.float()).abs()
    bound = 2**-7 if dtype == torch.bfloat16 else 1e-5
    assert (difference <= bound * expected.float().abs() + 1e-30).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 31, 33, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_linear(rows: int, dtype: torch.dtype, bias: bool) -> None:
    weight, x = torch.randn(960, 576).to(dtype), torch.randn(rows, 576).to(dtype)
    offset = torch.randn(960).to(dtype) if bias else None
    expected = x.double() @ weight.double().T + (offset.double() if bias else 0)  # type: ignore[union-attr]
    layer = PackedLinear(weight, offset)
    weight.zero_()  # the layer has its own copy
    assert_close(layer(x), expected, LINEAR[dtype])


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        PackedLinear(torch.zeros(4, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match="float64"):
        rms_norm(torch.zeros(2, 16).double(), torch.ones(16), 1e-5)


def test_all_compiled_sources_are_part_of_the_cache_s_name() -> None:
    """Numba would not see that a function compiled into another has changed."""
    folder = Path(compile_cache.__file__).parent
    named = {path for pattern in compile_cache.COMPILED for path in folder.glob(pattern)}
    compiled = {
        path
        for path in folder.glob("*.py")
        if re.search(r"^(from|import) (numba|llvmlite)", path.read_text(), re.MULTILINE)
    }
    assert compiled - named == {Path(compile_cache.__file__)}


def test_one_pool_of_threads_and_a_name_shared_with_transformers() -> None:
    """After all kernels ran: a single libgomp; and transformers is content with our `kernels`."""
    script = (
        "from kernels.threading import configure_environment, configure_torch\n"
        "configure_environment(2)\n"
        "import torch, transformers, kernels\n"
        "from kernels.warm_up import warm_up\n"
        "configure_torch(2)\n"
        "warm_up(torch.bfloat16)\n"
        "from transformers.models.llama.modeling_llama import LlamaForCausalLM\n"
        "from kernels.elementwise import rms_norm\n"
        "rms_norm(torch.ones(500, 576), torch.ones(576), 1e-5)\n"
        "maps = {line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line}\n"
        "print(torch.get_num_threads(), len(maps))\n"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.split() == ["2", "1"]
