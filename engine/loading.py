"""From a configuration to an engine's parts: model, memory, checkpoint, scheduler."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from engine.config import EngineConfig
from engine.cuda_graphs import MAX_ROWS, CudaCapture, DecodeGraphs
from engine.devices import page_count, resolve_device, resolve_dtype
from engine.memory.kv_cache import KVCache
from engine.memory.page_pool import PAGE_SIZE, PagePool
from engine.messages import EngineInfo
from engine.model.attention import Gate
from engine.model.cuda_gate import sharing_seconds
from engine.model.decoder import Decoder
from engine.model.geometry import ModelConfig
from engine.model.model_config import read_model_config
from engine.model.sharing_gate import ROWS, TOKENS, SharingGate
from engine.model.tokenizer import ChatTokenizer
from engine.model.weight_loading import load_weights
from engine.model_runner import ModelRunner
from engine.profile.choice import choose_format, make_gate, make_plans
from engine.profile.record import AttentionCosts
from engine.profile.weight_figures import WeightFormat
from engine.restoration.checkpoint import CODING, Recorder
from engine.restoration.chunk_store import ChunkStore
from engine.restoration.coding import Coding
from engine.restoration.host_copies import HostCopies
from engine.restoration.leading import LeadingLayers
from engine.restoration.plan import OnePlan, Plans, choose_plan
from engine.restoration.restorer import Restorer
from engine.scheduler import Scheduler
from engine.speculation import Speculation
from kernels.coding import warm_up as warm_up_coding
from kernels.prefix_choice import PrefixKernel, choose_prefix_kernel
from kernels.quantised import warm_up as warm_up_quantised
from kernels.threading import configure_torch
from kernels.triton_spans import AttentionShape
from kernels.warm_up import warm_up

MIN_PAGES = 4
PREFIX_TOKENS = 2048  # that the kernels for the prefix part are compared on

log = logging.getLogger(__name__)


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
    device = resolve_device(config.device)
    on_cuda = device.type == "cuda"
    dtype = resolve_dtype(config.dtype, device)
    heads, head_dim = geometry.num_kv_heads, geometry.head_dim
    page_bytes = KVCache.bytes_per_page(geometry.num_layers, heads, head_dim, dtype)
    num_pages = page_count(config, geometry, dtype, device)
    if num_pages < MIN_PAGES:
        raise ValueError(
            f"kv_memory is {num_pages * page_bytes} bytes; this model needs at least "
            f"{MIN_PAGES * page_bytes}"
        )
    own_limit = geometry.max_position_embeddings
    fits = (num_pages - 2) * PAGE_SIZE  # prefix and chat each end inside a page
    context_length = min(config.max_context or own_limit, own_limit, fits)
    coding = Coding(config.checkpoint_bits, CODING[dtype])
    rotate = store is not None and coding.needs_rotation(
        config.checkpoint_method, geometry.hidden_size, heads, head_dim
    )
    if on_cuda:
        format = _format_on_cuda(config, dtype)
    else:
        warm_up(dtype, head_dim)
        if coding.bits < 16:
            warm_up_coding(dtype, coding.bits)
        format = choose_format(config, geometry, rotate)
        if format in ("int8", "int4"):
            warm_up_quantised(dtype)
    config = msgspec.structs.replace(config, weights=format)
    weights = load_weights(
        model_dir, geometry, dtype, context_length, device, rotate=rotate, format=format
    )
    weights = replace(weights, fingerprint=coding.fingerprint(weights.fingerprint))
    # on CUDA one page more, for what is left over in captured steps
    cache = KVCache(geometry.num_layers, num_pages + on_cuda, heads, head_dim, dtype, device)
    gate = _gate(config, geometry, dtype, device)
    layer_bytes = (coding.hidden_bytes(geometry.hidden_size), coding.kv_bytes(heads, head_dim))
    if on_cuda:  # nothing of a restore is measured there
        method = config.checkpoint_method
        plans: Plans = OnePlan(choose_plan(method, geometry.num_layers, *layer_bytes))
    else:
        plans = make_plans(config, weights, coding)
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
            HostCopies(device) if on_cuda else None,
            coding=coding,
        )

    def make_graphs(decoder: Decoder) -> DecodeGraphs:
        rows = min(MAX_ROWS, config.max_batch)
        return DecodeGraphs(
            decoder,
            context_length,
            num_pages,
            CudaCapture(),
            max_rows=rows,
            recorder=recorder,
        )

    if on_cuda:
        kernel = _prefix_kernel(config, geometry, dtype, device)
        runner = ModelRunner(weights, cache, recorder, gate, make_graphs, kernel)
        runner.warm_up(num_pages)
    else:
        runner = ModelRunner(weights, cache, recorder, gate)
    restorer = Restorer(store, recorder, cache, LeadingLayers(runner.decoder, gate))
    info = EngineInfo(
        model_name=config.model_name,
        family=geometry.family.name,
        dtype=CODING[dtype],
        weights=format,
        num_layers=geometry.num_layers,
        context_length=context_length,
        vocab_size=geometry.vocab_size,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        bytes_per_token_kv=page_bytes // PAGE_SIZE,
        bytes_per_token_checkpoint=plan.bytes_per_token(*layer_bytes),
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
            speculation=Speculation(config.speculation, context_length),
        ),
        recorder=recorder,
    )


def _format_on_cuda(config: EngineConfig, dtype: torch.dtype) -> WeightFormat:
    """The dtype's own. Raises ValueError for any other that the settings name."""
    own: WeightFormat = "bf16" if dtype == torch.bfloat16 else "fp32"
    if config.weights not in ("auto", own):
        raise ValueError(f"weights is {config.weights}; on CUDA they are in the dtype, {own}")
    return own


def _gate(
    config: EngineConfig, geometry: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Gate:
    """Who shares the read of a node; on CUDA measured at each start, in some seconds."""
    if device.type == "cpu" or config.share_prefix != "auto" or not config.profile_path:
        return make_gate(config, geometry, dtype)
    shape = AttentionShape(geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, dtype)
    shared, own = sharing_seconds(shape, device, ROWS, TOKENS)
    return SharingGate(AttentionCosts(rows=ROWS, tokens=TOKENS, shared_s=shared, own_s=own))


def _prefix_kernel(
    config: EngineConfig, geometry: ModelConfig, dtype: torch.dtype, device: torch.device
) -> PrefixKernel:
    """Triton's or torch's, the faster for a chunk of a prompt behind a long shared prefix.

    Captured decode steps always take Triton's: torch's has addresses and lengths as arguments, and
    would have to be captured anew for each prefix.
    """
    shape = AttentionShape(geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, dtype)
    choice = choose_prefix_kernel(shape, config.prefill_chunk, PREFIX_TOKENS, device)
    other = "not for this dtype" if choice.torch_s is None else f"{choice.torch_s * 1e3:.3f} ms"
    log.info(
        "prefix attention, %d rows over %d keys: Triton %.3f ms, torch %s",
        config.prefill_chunk,
        PREFIX_TOKENS,
        choice.triton_s * 1e3,
        other,
    )
    return choice.kernel
