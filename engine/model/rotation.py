"""A model in another basis: its residual stream rotated, offline, by a fixed orthogonal matrix.

A pre-norm decoder computes the same function when its residual stream x becomes x Q, for any
orthogonal Q that is folded into the weights (QuaRot, section 3; SpinQuant, section 3.1): a norm
without weights commutes with Q, so norm weights go into the projections that follow. In the rotated
basis no channel stands out, which is what makes 8 bits enough for hidden states and activations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from engine.errors import ModelError
from engine.model.geometry import ModelConfig

SEED = 20_250_330
KEY = f"rotation 1, seed {SEED}"  # what a fingerprint says of the basis that a model runs in
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"

GetTensor = Callable[[str], Tensor]  # by its name in the model's files


def rotation_matrix(width: int) -> Tensor:
    """The orthogonal matrix for this width, fp64 [width, width], always the same one.

    A Hadamard matrix with random signs where one is known for the width (Paley's, doubled after
    Sylvester), else Q of the QR decomposition of a Gaussian matrix.
    """
    random = np.random.RandomState(SEED)  # its stream is frozen, unlike that of newer generators
    signs = torch.from_numpy(random.choice((-1.0, 1.0), width))
    order = width
    while order % 2 == 0 and not _is_paley(order):
        order //= 2
    if order > 1 and not _is_paley(order):
        gaussian = torch.from_numpy(random.standard_normal((width, width)))
        orthogonal: Tensor = torch.linalg.qr(gaussian).Q
        return orthogonal
    matrix = _paley(order)
    doubling = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(matrix) < width:
        matrix = torch.kron(doubling, matrix)
    result: Tensor = signs[:, None] * matrix / width**0.5
    return result


def _is_paley(order: int) -> bool:
    return order % 4 == 0 and _is_prime(order - 1)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def _paley(order: int) -> Tensor:
    """A Hadamard matrix of +-1, fp64 [order, order]; order 1, or p + 1 with p = 3 mod 4 prime.

    Paley's first construction: I + S, S skew-symmetric from the quadratic residues modulo p.
    """
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    p = order - 1
    character = torch.full((p,), -1.0, dtype=torch.float64)
    character[torch.arange(1, p) ** 2 % p] = 1.0
    character[0] = 0.0
    place = torch.arange(p)
    s = torch.zeros(order, order, dtype=torch.float64)
    s[0, 1:], s[1:, 0] = 1.0, -1.0
    s[1:, 1:] = character[(place[:, None] - place[None]) % p]
    return s + torch.eye(order, dtype=torch.float64)


def rotated_config(config: ModelConfig) -> ModelConfig:
    """The geometry of the rotated model: its head is a matrix of its own.

    Raises ModelError for a family that normalises the output of its blocks: a norm's weights stand
    between such a block and the residual stream, where no rotation commutes with them.
    """
    if config.family.norm_after:
        raise ModelError(
            f"its residual stream cannot be rotated: {config.family.architecture} normalises the "
            "output of its blocks, and 8-bit hidden states and 8-bit weights need a rotation"
        )
    return replace(config, tie_word_embeddings=False)


def rotated(get: GetTensor, config: ModelConfig) -> GetTensor:
    """The weights of the same function in the rotated basis, by the same names, fp32.

    `get` gives the model's own, and `config` is the model's own; the weights fit
    `rotated_config(config)`: all norms of blocks are ones, and there is a head. Computed in fp64,
    one tensor at a time, when it is asked for. Raises ModelError as `rotated_config` does.
    """
    rotated_config(config)
    q = rotation_matrix(config.hidden_size)

    def reads(weight: Tensor, norm: Tensor) -> Tensor:
        """Of a projection that reads the normed stream: W diag(norm) Q."""
        return (weight.double() * norm.double()) @ q

    def writes(weight: Tensor) -> Tensor:
        """Of a projection that adds to the stream: Q^T W."""
        return q.T @ weight.double()

    def make(name: str) -> Tensor:
        if name == _EMBEDDING:
            return get(name).double() @ q
        if name == _HEAD:
            own = _EMBEDDING if config.tie_word_embeddings else _HEAD
            return reads(get(own), get("model.norm.weight"))
        if name == "model.norm.weight" or name.endswith("layernorm.weight"):
            return torch.ones_like(get(name))
        block, _, part = name.rpartition("self_attn.")
        if part in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
            return reads(get(name), get(f"{block}input_layernorm.weight"))
        block, _, part = name.rpartition("mlp.")
        if part in ("gate_proj.weight", "up_proj.weight"):
            return reads(get(name), get(f"{block}post_attention_layernorm.weight"))
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return writes(get(name))
        return get(name)  # biases, and norms of Q and K: behind the projections

    return lambda name: make(name).float().contiguous()
