"""The engine: one loop that schedules, runs and answers."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from engine.batch import Segment
from engine.config import EngineConfig
from engine.memory.kv_cache import KVCache
from engine.memory.page_pool import PAGE_SIZE, PagePool
from engine.messages import (
    Cancel,
    Delta,
    Done,
    EngineInfo,
    EngineStats,
    Failed,
    FailureKind,
    FinishReason,
    Forget,
    Forgotten,
    FromEngine,
    GetStats,
    Phase,
    Stats,
    Status,
    Submit,
    ToEngine,
    Warm,
)
from engine.model.output import OutputText
from engine.model.sampler import PenaltyState, sample
from engine.model.source import read_model_config
from engine.model.tokenizer import ChatTokenizer
from engine.model.weights import load_weights
from engine.model_runner import ModelRunner
from engine.request import Request, State, Work, now
from engine.restoration.checkpoint import Recorder
from engine.restoration.chunk_store import ChunkStore
from engine.restoration.plan import choose_plan
from engine.restoration.restorer import Restorer
from engine.scheduler import Scheduler
from kernels.threading import configure_torch
from kernels.warm_up import warm_up

logger = logging.getLogger(__name__)

RESTORE_SLICE_S = 0.008  # of a step, while others decode or read their prompts
RESTORE_ALONE_S = 0.1
PROGRESS_S = 0.1  # between two progress messages of one request
BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")


class Engine:
    """Owns all mutable state of inference. One thread calls everything here.

    `step` is the architecture: admit, restore a slice, schedule, run, sample, answer.
    """

    def __init__(
        self, config: EngineConfig, store: ChunkStore | None, emit: Callable[[FromEngine], None]
    ) -> None:
        """Load the model and make ready. Raises ModelError."""
        began = time.perf_counter()
        configure_torch(config.num_threads)
        model_dir = Path(config.model_dir)
        geometry = read_model_config(model_dir)
        dtype = resolve_dtype(config.dtype)
        page_bytes = KVCache.bytes_per_page(
            geometry.num_layers, geometry.num_kv_heads, geometry.head_dim, dtype
        )
        num_pages = config.kv_memory_bytes // page_bytes
        if num_pages < 4:
            raise ValueError(
                f"kv_memory is {config.kv_memory_bytes} bytes; this model needs at least "
                f"{4 * page_bytes}"
            )
        own_limit = config.max_context or geometry.max_position_embeddings
        self.context_length = min(
            own_limit, geometry.max_position_embeddings, (num_pages - 2) * PAGE_SIZE
        )
        weights = load_weights(model_dir, geometry, dtype, self.context_length)
        warm_up(dtype, geometry.head_dim)
        self.tokenizer = ChatTokenizer(model_dir)
        self._eos = frozenset(geometry.eos_token_ids)
        cache = KVCache(
            geometry.num_layers, num_pages, geometry.num_kv_heads, geometry.head_dim, dtype
        )
        kv_size = geometry.num_kv_heads * geometry.head_dim
        plan = choose_plan(
            config.checkpoint_method, geometry.num_layers, geometry.hidden_size, kv_size
        )
        self._recorder: Recorder | None = None
        if store is not None:
            store.collect(weights.fingerprint)
            self._recorder = Recorder(
                plan,
                cache,
                store,
                weights.fingerprint,
                geometry.hidden_size,
                config.staging_bytes,
            )
        self._runner = ModelRunner(weights, cache, self._recorder, config.share_prefix)
        restorer = Restorer(
            store, self._recorder, cache, self._runner.decoder.restore, weights.fingerprint
        )
        self.scheduler = Scheduler(
            PagePool(num_pages),
            restorer,
            max_batch=config.max_batch,
            prefill_chunk=config.prefill_chunk,
        )
        self._config = config
        self._store = store
        self._emit = emit
        self._requests: dict[str, Request] = {}
        self._pending_forget: deque[tuple[int, list[str]]] = deque()
        self._progress: dict[str, float] = {}
        self._counters = dict.fromkeys(
            ("steps", "decoded", "prefilled", "restored", "recomputed", "rejected"), 0
        )
        self._last_step = now()
        item = dtype.itemsize
        self.info = EngineInfo(
            model_name=config.model_name,
            family=geometry.family,
            dtype="bf16" if dtype == torch.bfloat16 else "fp32",
            num_layers=geometry.num_layers,
            context_length=self.context_length,
            vocab_size=geometry.vocab_size,
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            bytes_per_token_kv=page_bytes // PAGE_SIZE,
            bytes_per_token_checkpoint=plan.bytes_per_token(geometry.hidden_size, kv_size, item),
            checkpoint_method=plan.name if store is not None else "recompute",
            checkpoint_reason=plan.reason
            if store is not None
            else "no checkpoint directory is set",
            fingerprint=weights.fingerprint.hex(),
            load_ms=(time.perf_counter() - began) * 1e3,
        )

    # -- messages ------------------------------------------------------------------------------

    def handle(self, message: ToEngine) -> None:
        """Take one message of the app; answers go out through `emit`."""
        match message:
            case Submit():
                self._submit(message)
            case Cancel():
                request = self._requests.get(message.request_id)
                if request is not None:
                    self._finish(request, "cancelled")
            case Warm():
                self.scheduler.warm(message.chat_id, message.prefix_ids, message.history_ids)
            case Forget():
                self._forget(message)
            case GetStats():
                self._emit(Stats(call_id=message.call_id, stats=self.stats()))
            case _:
                raise ValueError(f"the engine cannot handle {type(message).__name__}")

    def _submit(self, submit: Submit) -> None:
        request = Request(submit, now())
        total = request.position + len(request.prompt)
        refusal = ""
        if not submit.new_ids:
            refusal = "the turn has no tokens"
        elif total >= self.context_length:
            refusal = f"the chat has {total} tokens; the context holds {self.context_length}"
        elif request.position > self.context_length // 2:
            refusal = (
                f"the shared prefix has {request.position} tokens; at most half of the context "
                f"({self.context_length // 2}) may be prefix"
            )
        if refusal:
            self._fail(request, "context_overflow", refusal)
        elif len(self.scheduler.waiting) >= self._config.max_queue:
            self._fail(request, "queue_full", f"{self._config.max_queue} requests are waiting")
        else:
            request.text = OutputText(self.tokenizer, submit.sampling.stop)
            request.penalty = PenaltyState.for_request(
                submit.sampling, [*submit.prefix_ids, *request.prompt]
            )
            self._requests[request.id] = request
            self.scheduler.waiting.append(request)
            self._emit(
                Status(request_id=request.id, phase="queued", total=len(self.scheduler.waiting))
            )

    def _forget(self, message: Forget) -> None:
        chats = set(message.chat_ids)
        for request in [r for r in self._requests.values() if r.chat_id in chats]:
            self._finish(request, "cancelled")
        for chat_id in chats:
            self.scheduler.forget(chat_id)
        if self._store is not None:
            self._store.forget([f"c-{chat_id}" for chat_id in chats])
        self._emit(Forgotten(call_id=message.call_id))

    def stats(self) -> EngineStats:
        """Gauges and counters, as of now."""
        scheduler, count = self.scheduler, self._counters
        store, recorder = self._store, self._recorder
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            restoring=sum(1 for _ in scheduler.restoring()),
            resident_chats=len(scheduler.tree.chats),
            prefix_nodes=len(scheduler.tree.nodes),
            pages_total=scheduler.pool.num_pages,
            pages_free=scheduler.pool.num_free,
            steps=count["steps"],
            tokens_decoded=count["decoded"],
            tokens_prefilled=count["prefilled"],
            tokens_restored=count["restored"],
            tokens_recomputed=count["recomputed"],
            prefix_tokens_shared=self._runner.prefix_tokens_shared,
            preemptions=scheduler.preemptions,
            evictions=scheduler.evictions,
            stripes_written=store.stripes_written if store is not None else 0,
            stripes_dropped=(recorder.stripes_dropped if recorder is not None else 0)
            + (store.stripes_dropped if store is not None else 0),
            stripes_rejected=count["rejected"],
            disk_bytes=store.bytes_used if store is not None else 0,
            disk_cap_bytes=store.bytes_cap if store is not None else 0,
            last_step_age_ms=(now() - self._last_step) * 1e3,
        )

    # -- the loop ------------------------------------------------------------------------------

    def has_work(self) -> bool:
        s = self.scheduler
        return bool(s.waiting or s.running or s.node_loads or s.warm_loads)

    def idle_wait(self) -> float:
        """Seconds to wait for a message before `idle_tick` is due."""
        oldest = self.scheduler.tree.oldest_chat()
        if oldest is None:
            return 1.0
        return min(1.0, max(0.01, oldest[1] + self._config.idle_evict_s - now()))

    def idle_tick(self) -> None:
        """Housekeeping while nothing runs: chats idle for long give their pages back."""
        self._last_step = now()
        self.scheduler.evict_older_than(now() - self._config.idle_evict_s)

    def step(self) -> None:
        """Advance everything by one step; returns soon, so that messages are seen."""
        self._last_step = now()
        self.scheduler.evict_older_than(now() - self._config.idle_evict_s)
        self._admit()
        self._restore()
        decode, prefill = self.scheduler.schedule()
        if not decode and not prefill:
            return
        self._mark_prefill(prefill)
        batch, logits = self._runner.run(list(decode), list(prefill))
        self._counters["steps"] += 1
        self._counters["decoded"] += len(decode)
        for segment, request in decode.items():
            segment.seq.num_computed = segment.end
            request.decode_steps += 1
            request.decode_rows += len(decode)
        for segment, work in prefill.items():
            self._counters["prefilled"] += segment.end - segment.start
            work.computed(segment.end)
            if not work.todo:
                self.scheduler.prefilled(work)
        sampled = [decode.get(s) or prefill[s] for s in batch.logit_segments]
        self._answer([work for work in sampled if isinstance(work, Request)], logits)

    def _admit(self) -> None:
        for request in self.scheduler.admit():
            if not request.preemptions:
                self._counters["recomputed"] += request.recomputed_tokens
            if request.restore is not None:
                self._report(request, "restoring", 0, request.restore.tokens_total)
        if self.scheduler.waiting and not self.has_running():
            request = self.scheduler.waiting.popleft()
            reason = f"its {request.position + len(request.ids)} tokens do not fit in memory"
            self._fail(request, "internal", reason)

    def has_running(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.node_loads)

    def _restore(self) -> None:
        """Give restores a slice of this step: short while others have work for the model."""
        work = list(self.scheduler.restoring())
        if not work:
            return
        alone = not any(w.state in (State.DECODE, State.PREFILL) for w in self._all_work())
        deadline = now() + (RESTORE_ALONE_S if alone else RESTORE_SLICE_S)
        for item in work:
            job = item.restore
            assert job is not None, "restoring work has no restore"
            job.advance(max(0.0, deadline - now()), wait=alone)
            if isinstance(item, Request):
                self._report(item, "restoring", job.tokens_done, job.tokens_total)
            if job.finished:
                self.scheduler.restored(item)
                self._counters["restored"] += job.tokens_done
                if isinstance(item, Request):
                    self._counters["recomputed"] += item.recomputed_tokens
                if job.rejected:
                    self._counters["rejected"] += len(job.rejected)
                    logger.warning(
                        "%s: %d of its chunks cannot be used and will be recomputed; the first: %s",
                        item.sequence.owner,
                        len(job.rejected),
                        job.rejected[0],
                    )
            if now() >= deadline:
                break

    def _all_work(self) -> list[Work]:
        s = self.scheduler
        return [*s.node_loads, *s.running, *s.warm_loads.values()]

    def _mark_prefill(self, prefill: dict[Segment, Work]) -> None:
        for segment, work in prefill.items():
            if isinstance(work, Request):
                request, total = work, len(work.sequence.ids)
                if request.timing.prefill_began is None:
                    request.timing.prefill_began = now()
                self._report(request, "reading", segment.start, total)
                continue
            requester = getattr(work, "requester", None)
            if requester is not None:
                requester.prefix_computed_tokens += segment.end - segment.start
                self._report(requester, "reading", segment.start, len(work.sequence.ids))

    def _answer(self, requests: list[Request], logits: Tensor) -> None:
        """Sample one token for each request and say it."""
        if not requests:
            return
        positions = [r.position + len(r.sequence.ids) for r in requests]
        states = [r.penalty for r in requests]
        tokens = sample(logits, [r.sampling for r in requests], positions, states)
        at = now()
        for request, token in zip(requests, tokens.tolist(), strict=True):
            self._push(request, token, at)

    def _push(self, request: Request, token: int, at: float) -> None:
        timing = request.timing
        if timing.first_token is None:
            timing.first_token = at
        if token in self._eos:
            self._finish(request, "eos")
            return
        timing.tokens.append(at)
        request.output.append(token)
        request.sequence.ids.append(token)
        if request.penalty is not None:
            request.penalty.push(token)
        assert request.text is not None, "a running request has no text"
        text, stopped = request.text.push(token)
        full = request.position + len(request.sequence.ids) >= self.context_length
        finish: FinishReason | None = None
        if stopped:
            finish = "stop"
        elif full or len(request.output) >= request.sampling.max_tokens:
            finish = "length"
        self._emit(Delta(request_id=request.id, token_ids=[token], text=text))
        if finish is not None:
            self._finish(request, finish)

    # -- the end of a request ------------------------------------------------------------------

    def _finish(self, request: Request, finish: FinishReason) -> None:
        """End a request in whatever state it is; its chat stays resident."""
        if request.state is State.WAITING:
            self.scheduler.waiting.remove(request)
        else:
            self.scheduler.finish(request)
        if finish != "stop" and request.text is not None:
            rest = request.text.flush()
            if rest:
                self._emit(Delta(request_id=request.id, token_ids=[], text=rest))
        self._drop(request)
        self._emit(Done(request_id=request.id, finish=finish, stats=request.stats(now())))

    def _fail(self, request: Request, kind: FailureKind, reason: str) -> None:
        self._drop(request)
        self._emit(Failed(request_id=request.id, kind=kind, reason=reason))

    def _drop(self, request: Request) -> None:
        self._requests.pop(request.id, None)
        self._progress.pop(request.id, None)

    def fail_all(self, reason: str) -> None:
        """A step failed: every request ends with this reason, and all memory is given back."""
        for request in list(self._requests.values()):
            self._fail(request, "internal", reason)
        self.scheduler.reset()

    def close(self) -> None:
        """Flush what the running requests have, and wait for the writer."""
        for request in list(self._requests.values()):
            self._finish(request, "cancelled")
        if self._store is not None:
            self._store.flush(timeout_s=10.0)

    def _report(self, request: Request, phase: Phase, done: int, total: int) -> None:
        """Tell how far a request is, at most every `PROGRESS_S` seconds."""
        at = now()
        if at - self._progress.get(request.id, 0.0) < PROGRESS_S and done:
            return
        self._progress[request.id] = at
        self._emit(Status(request_id=request.id, phase=phase, done=done, total=total))


def resolve_dtype(name: str) -> torch.dtype:
    """`auto` is bf16 where the CPU has instructions for it, else fp32."""
    if name == "auto":
        try:
            flags = Path("/proc/cpuinfo").read_text().split()
        except OSError:
            flags = []
        name = "bf16" if any(flag in flags for flag in BF16_FLAGS) else "fp32"
    return torch.bfloat16 if name == "bf16" else torch.float32
