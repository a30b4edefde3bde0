"""What measured figures decide when an engine starts: who shares reads, and what is saved."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from engine.config import EngineConfig
from engine.model.attention import FixedGate, Gate
from engine.model.geometry import ModelConfig
from engine.model.rotation import rotated_config
from engine.model.sharing_gate import SharingGate, measure_attention
from engine.model.tokenizer import ChatTokenizer
from engine.model.weight_loading import open_tensors
from engine.model.weights import Weights
from engine.profile.cache import ProfileCache
from engine.profile.compute import measure_compute
from engine.profile.formats import measure_formats
from engine.profile.machine import (
    attention_key,
    compute_key,
    dtype_name,
    format_without_figures,
    formats_key,
)
from engine.profile.record import AttentionCosts, ComputeCosts
from engine.profile.sample_text import SAMPLE_TEXT
from engine.profile.shapes import Shape
from engine.profile.weight_figures import WeightFigures, WeightFormat
from engine.restoration.coding import Coding
from engine.restoration.plan import OnePlan, Plans, choose_plan
from engine.restoration.planner import Planner

log = logging.getLogger(__name__)

T = TypeVar("T")


def choose_format(
    config: EngineConfig, geometry: ModelConfig, rotate: bool, *, again: bool = False
) -> WeightFormat:
    """The format of projections and head: as the settings say, or by figures of the model.

    The figures are kept, or measured now, which reads the whole model once more. Raises ModelError,
    and ValueError for weights in fp32 or bf16 that are not the dtype.
    """
    known = format_without_figures(config)
    if known is not None:
        return known
    measure = partial(
        _said,
        "formats of the weights (loss, agreement and speed; once for a model)",
        partial(_measure_formats, config, geometry, rotate),
    )
    figures = _cache(config).obtain(
        formats_key(config, rotate), WeightFigures, measure, again=again
    )
    for line in figures.lines():
        log.info("weights: %s", line)
    return figures.best().format


def _measure_formats(config: EngineConfig, geometry: ModelConfig, rotate: bool) -> WeightFigures:
    model_dir = Path(config.model_dir)
    get = open_tensors(model_dir, geometry, rotate=rotate)
    if rotate:
        geometry = rotated_config(geometry)
    ids = ChatTokenizer(model_dir).encode_text(SAMPLE_TEXT)
    dtype = torch.bfloat16 if dtype_name(config.dtype) == "bf16" else torch.float32
    return measure_formats(get, geometry, ids, dtype)


def make_gate(config: EngineConfig, geometry: ModelConfig, dtype: torch.dtype) -> Gate:
    """Who shares the read of a node: as the settings say, or by what was measured.

    Where nothing may be measured, every node is shared.
    """
    if config.share_prefix != "auto" or not config.profile_path:
        return FixedGate(config.share_prefix != "never")
    return SharingGate(attention_costs(config, geometry, dtype))


def make_plans(config: EngineConfig, weights: Weights, coding: Coding) -> Plans:
    """What is saved of each chat: as the settings say, or the fastest to restore here."""
    geometry = weights.config
    if config.checkpoint_method == "auto" and config.profile_path and config.disk is not None:
        costs = compute_costs(config, weights)
        return Planner(Shape.of(geometry), coding, costs, config.disk)
    hidden = coding.hidden_bytes(geometry.hidden_size)
    kv = coding.kv_bytes(geometry.num_kv_heads, geometry.head_dim)
    return OnePlan(choose_plan(config.checkpoint_method, geometry.num_layers, hidden, kv))


def attention_costs(
    config: EngineConfig, geometry: ModelConfig, dtype: torch.dtype, *, again: bool = False
) -> AttentionCosts:
    """Kept, or measured now."""
    heads = (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim)
    measure = partial(_said, "shared reads of prefixes", partial(measure_attention, *heads, dtype))
    key = attention_key(config, geometry)
    return _cache(config).obtain(key, AttentionCosts, measure, again=again)


def compute_costs(config: EngineConfig, weights: Weights, *, again: bool = False) -> ComputeCosts:
    """Kept, or measured now."""
    measure = partial(_said, "layers and projections", partial(measure_compute, weights))
    key = compute_key(config, weights.config)
    return _cache(config).obtain(key, ComputeCosts, measure, again=again)


def _cache(config: EngineConfig) -> ProfileCache:
    return ProfileCache(Path(config.profile_path) if config.profile_path else None)


def _said(what: str, measure: Callable[[], T]) -> T:
    """Measure, and say so."""
    log.info("measuring %s on this machine", what)
    return measure()
