"""From a configuration to an engine's parts: model, memory, checkpoint, scheduler."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.memory.kv_cache import KVCache
from engine.memory.page_pool import PAGE_SIZE, PagePool
from engine.messages import EngineInfo
from engine.model.model_config import read_model_config
from engine.model.tokenizer import ChatTokenizer
from engine.model.weight_loading import load_weights
from engine.model_runner import ModelRunner
from engine.profile.choice import make_gate, make_plans
from engine.profile.machine import dtype_name
from engine.restoration.checkpoint import CODING, Recorder
from engine.restoration.chunk_store import ChunkStore
from engine.restoration.leading import LeadingLayers
from engine.restoration.restorer import Restorer
from engine.scheduler import Scheduler
from kernels.threading import configure_torch
from kernels.warm_up import warm_up

MIN_PAGES = 4


@dataclass(frozen=True)
class Parts:
    """What an engine is made of."""

    info: EngineInfo
    tokenizer: ChatTokenizer
    eos_token_ids: frozenset[int]
    runner: ModelRunner
    scheduler: Scheduler
    recorder: Recorder | None


def load(config: EngineConfig, store: ChunkStore | None) -> Parts:
    """Read the model, reserve the memory, compile the kernels.

    The context is cut to what memory holds, so that a chat alone always fits. Raises ModelError,
    and ValueError when memory or staging is too small for the model.
    """
    began = time.perf_counter()
    configure_torch(config.num_threads)
    model_dir = Path(config.model_dir)
    geometry = read_model_config(model_dir)
    dtype = resolve_dtype(config.dtype)
    heads, head_dim = geometry.num_kv_heads, geometry.head_dim
    page_bytes = KVCache.bytes_per_page(geometry.num_layers, heads, head_dim, dtype)
    num_pages = config.kv_memory_bytes // page_bytes
    if num_pages < MIN_PAGES:
        raise ValueError(
            f"kv_memory is {config.kv_memory_bytes} bytes; this model needs at least "
            f"{MIN_PAGES * page_bytes}"
        )
    own_limit = geometry.max_position_embeddings
    fits = (num_pages - 2) * PAGE_SIZE  # prefix and chat each end inside a page
    context_length = min(config.max_context or own_limit, own_limit, fits)
    weights = load_weights(model_dir, geometry, dtype, context_length)
    warm_up(dtype, head_dim)
    cache = KVCache(geometry.num_layers, num_pages, heads, head_dim, dtype)
    gate = make_gate(config, geometry, dtype)
    plans = make_plans(config, weights)
    plan = plans.plan(0, 0)
    recorder: Recorder | None = None
    if store is not None:
        store.collect(weights.fingerprint)
        recorder = Recorder(
            plans,
            cache,
            store,
            weights.fingerprint,
            geometry.hidden_size,
            context_length,
            config.staging_bytes,
        )
    runner = ModelRunner(weights, cache, recorder, gate)
    restorer = Restorer(store, recorder, cache, LeadingLayers(runner.decoder, gate))
    info = EngineInfo(
        model_name=config.model_name,
        family=geometry.family.name,
        dtype=CODING[dtype],
        num_layers=geometry.num_layers,
        context_length=context_length,
        vocab_size=geometry.vocab_size,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        bytes_per_token_kv=page_bytes // PAGE_SIZE,
        bytes_per_token_checkpoint=plan.bytes_per_token(
            geometry.hidden_size, heads * head_dim, dtype.itemsize
        ),
        checkpoint_method=plan.name if store is not None else "recompute",
        checkpoint_reason=plan.reason if store is not None else "no checkpoint directory is set",
        fingerprint=weights.fingerprint.hex(),
        load_ms=(time.perf_counter() - began) * 1e3,
    )
    return Parts(
        info=info,
        tokenizer=ChatTokenizer(model_dir),
        eos_token_ids=frozenset(geometry.eos_token_ids),
        runner=runner,
        scheduler=Scheduler(
            PagePool(num_pages),
            cache,
            restorer,
            max_batch=config.max_batch,
            prefill_chunk=config.prefill_chunk,
        ),
        recorder=recorder,
    )


def resolve_dtype(name: str) -> torch.dtype:
    """`auto` is bf16 where the CPU has instructions for it, else fp32."""
    return torch.bfloat16 if dtype_name(name) == "bf16" else torch.float32
