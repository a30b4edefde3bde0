"""Measures what a model costs on this machine, in a process without an engine."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.model.model_config import read_model_config
from engine.profile.machine import rotates
from kernels.threading import configure_environment, configure_torch

log = logging.getLogger(__name__)


def measure_model(config: EngineConfig, *, again: bool) -> None:
    """Measure what is not kept yet, or all of it `again`. Raises ModelError.

    To be called before torch is imported, which reads its thread settings then.
    """
    configure_environment(config.num_threads)
    from engine.devices import resolve_dtype
    from engine.model.weight_loading import load_weights
    from engine.profile.choice import attention_costs, choose_format, compute_costs
    from kernels.warm_up import warm_up

    configure_torch(config.num_threads)
    model_dir = Path(config.model_dir)
    geometry = read_model_config(model_dir)
    dtype = resolve_dtype(config.dtype)
    warm_up(dtype, geometry.head_dim)
    rotate = rotates(config, geometry)
    format = choose_format(config, geometry, rotate, again=again)
    config = msgspec.structs.replace(config, weights=format)
    log.info("loading %s", config.model_name)
    positions = geometry.max_position_embeddings
    weights = load_weights(model_dir, geometry, dtype, positions, rotate=rotate, format=format)
    compute_costs(config, weights, again=again)
    attention_costs(config, geometry, dtype, again=again)
