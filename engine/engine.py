"""The engine: one loop that schedules, runs and answers."""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.batch import Segment
from engine.choosing import Chosen, choose
from engine.config import EngineConfig
from engine.free_memory import trim_memory
from engine.loading import load
from engine.memory.prefix_use import prefix_uses
from engine.messages import (
    Cancel,
    Collect,
    Delta,
    Done,
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
    TokenLogprobs,
    Warm,
)
from engine.model.constraints import Grammars
from engine.model.output import OutputText
from engine.model.shaping import Shaping
from engine.request import Request, State, Work, now
from engine.restoration.chunk_store import ChunkStore
from engine.restoration.host_tier import HostTier

logger = logging.getLogger(__name__)

RESTORE_SLICE_S = 0.008  # of a step, while others decode or read their prompts
RESTORE_ALONE_S = 0.1
TRIM_TOKENS = 2048  # of prompts, whose buffers are worth giving back
PROGRESS_S = 0.1  # between two progress messages of one request


class Engine:
    """Owns all mutable state of inference. One thread calls everything here.

    `step` is the architecture: admit, restore a slice, schedule, run, sample, answer.
    """

    def __init__(
        self, config: EngineConfig, store: ChunkStore | None, emit: Callable[[FromEngine], None]
    ) -> None:
        """Load the model and make ready. Raises ModelError, and ValueError for a bad setting."""
        if store is not None and config.host_cache_bytes:
            store = HostTier(store, config.host_cache_bytes)
        parts = load(config, store)
        self.info = parts.info
        self.context_length = parts.info.context_length
        self.tokenizer = parts.tokenizer
        self.runner = parts.runner
        self.scheduler = parts.scheduler
        self._recorder = parts.recorder
        self._eos = parts.eos_token_ids
        self._grammars = Grammars(parts.tokenizer, parts.info.vocab_size, parts.eos_token_ids)
        self._config = config
        self._store = store
        self._emit = emit
        self._requests: dict[str, Request] = {}
        self._progress: dict[str, tuple[Phase, float]] = {}  # what each request last told, and when
        self._counters = dict.fromkeys(
            (
                "steps",
                "decoded",
                "prefilled",
                "restored",
                "from_memory",
                "recomputed",
                "rejected",
            ),
            0,
        )
        self._last_step = now()
        self._untrimmed = 0  # tokens of prompts that were read since memory was given back

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
                self.scheduler.warm(
                    message.chat_id,
                    message.prefix_scope,
                    message.prefix_ids,
                    message.history_ids,
                )
            case Forget():
                self._forget(message)
            case Collect():
                if self._store is not None:
                    self._store.collect(bytes.fromhex(self.info.fingerprint))
                    self._store.forget(message.owners)
                self._emit(Forgotten(call_id=message.call_id))
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
        elif len(self._requests) >= self._config.max_batch + self._config.max_queue:
            self._fail(request, "queue_full", f"{len(self._requests)} requests run or wait")
        else:
            request.text = OutputText(self.tokenizer, submit.sampling.stop)
            try:
                request.shaping = Shaping.for_request(submit, self._grammars)
            except ValueError as error:
                self._fail(request, "internal", f"the grammar cannot be used: {error}")
                return
            for token in request.prompt[len(request.prompt) - submit.answered :]:
                request.text.push(token)
                if request.shaping is not None:
                    request.shaping.push(token)
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
            resident_chats=len(scheduler.resident.idle_chats()),
            prefix_nodes=sum(1 for root in scheduler.tree.prefixes.values() for _ in root.nodes()),
            pages_total=scheduler.pool.num_pages,
            pages_free=scheduler.pool.num_free,
            steps=count["steps"],
            tokens_decoded=count["decoded"],
            tokens_prefilled=count["prefilled"],
            tokens_restored=count["restored"],
            tokens_recomputed=count["recomputed"],
            prefix_tokens_shared=self.runner.prefix_tokens_shared,
            preemptions=scheduler.preemptions,
            evictions=scheduler.resident.evictions,
            stripes_written=store.stripes_written if store is not None else 0,
            stripes_dropped=(recorder.stripes_dropped if recorder is not None else 0)
            + (store.stripes_dropped if store is not None else 0),
            stripes_rejected=count["rejected"],
            write_refusals=store.write_refusals if store is not None else 0,
            write_trouble=store.write_trouble if store is not None else "",
            disk_bytes=store.bytes_used if store is not None else 0,
            disk_cap_bytes=store.bytes_cap if store is not None else 0,
            host_cache_bytes=store.bytes_held if isinstance(store, HostTier) else 0,
            tokens_from_memory=count["from_memory"],
            tokens_drafted=scheduler.speculation.drafted,
            tokens_accepted=scheduler.speculation.accepted,
            last_step_age_ms=(now() - self._last_step) * 1e3,
            prefixes=prefix_uses(scheduler.tree),
        )

    # -- the loop ------------------------------------------------------------------------------

    def has_work(self) -> bool:
        s = self.scheduler
        return bool(s.waiting or s.running or s.node_loads or s.warm_loads)

    def idle_wait(self) -> float:
        """Seconds to wait for a message before `idle_tick` is due."""
        oldest = self.scheduler.resident.oldest_chat()
        if oldest is None:
            return 1.0
        return min(1.0, max(0.01, oldest[1] + self._config.idle_evict_s - now()))

    def idle_tick(self) -> None:
        """Housekeeping while nothing runs: chats idle for long give their pages back."""
        self._grammars.prepare()
        self._last_step = now()
        self.scheduler.resident.evict_older_than(now() - self._config.idle_evict_s)

    def step(self) -> None:
        """Advance everything by one step; returns soon, so that messages are seen."""
        self._last_step = now()
        self.scheduler.resident.evict_older_than(now() - self._config.idle_evict_s)
        self._admit()
        self._restore()
        decode, prefill = self.scheduler.schedule()
        if not prefill and self._untrimmed >= TRIM_TOKENS:
            trim_memory()
            self._untrimmed = 0
        if not decode and not prefill:
            return
        self._mark_prefill(prefill)
        began = now()
        plain = [segment for segment in decode if not segment.draft]
        drafted = [segment for segment in decode if segment.draft]
        batch, logits = self.runner.run(plain, [*drafted, *prefill])
        self._measure(len(decode), batch.num_tokens - len(decode), bool(prefill), now() - began)
        self._counters["steps"] += 1
        self._counters["decoded"] += len(decode)
        for segment, request in decode.items():
            segment.seq.num_computed = segment.end - len(segment.draft)
            request.decode_steps += 1
            request.decode_rows += len(decode)
        for segment, work in prefill.items():
            self._counters["prefilled"] += segment.end - segment.start
            self._untrimmed += segment.end - segment.start
            work.computed(segment.end)
            if not work.todo:
                self.scheduler.prefilled(work)
        if batch.logit_segments:
            self._answer(choose(batch.logit_segments, {**prefill, **decode}, logits))

    def _measure(self, chats: int, others: int, prompts: bool, seconds: float) -> None:
        """A step took so long: with a row for each chat, and others of prompts or of drafts."""
        scheduler = self.scheduler
        if prompts or not others:
            scheduler.chunk.ran(chats, others, seconds)
        if not prompts:
            scheduler.speculation.ran(chats, others, seconds)

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
                self._counters["from_memory"] += job.tokens_from_memory
                if isinstance(item, Request):
                    self._counters["recomputed"] += item.recomputed_tokens
                if job.rejected:
                    self._counters["rejected"] += len(job.rejected)
                    logger.warning(
                        "%s: %d of its chunks cannot be used and will be recomputed; the first: %s",
                        job.seq.owner,
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

    def _answer(self, chosen: list[Chosen]) -> None:
        """Say the tokens that the answers go on with."""
        at = now()
        for one in chosen:
            request = one.request
            if one.segment.draft:
                right = len(one.tokens) - 1
                self.scheduler.speculation.verified(len(one.segment.draft), right)
                self._counters["decoded"] += right
            for i, (token, score) in enumerate(zip(one.tokens, one.scores, strict=True)):
                if i:  # the token before it was in the draft, and so it is computed
                    one.segment.seq.num_computed += 1
                self._push(request, token, at, score)
                if request.id not in self._requests:
                    break

    def _push(self, request: Request, token: int, at: float, score: TokenLogprobs | None) -> None:
        timing = request.timing
        if timing.first_token is None:
            timing.first_token = at
        if request.shaping is not None and (fault := request.shaping.fault):
            self.scheduler.finish(request)
            self._fail(request, "internal", f"the answer's grammar was given up: {fault}")
            return
        if token in self._eos:
            self._finish(request, "eos")
            return
        timing.tokens.append(at)
        request.output.append(token)
        request.sequence.ids.append(token)
        if request.shaping is not None:
            request.shaping.push(token)
        assert request.text is not None, "a running request has no text"
        text, stopped = request.text.push(token)
        full = request.sequence.position + len(request.sequence) >= self.context_length
        finish: FinishReason | None = None
        if stopped:
            finish = "stop"
        elif full or len(request.output) >= request.sampling.max_tokens:
            finish = "length"
        scores = None if score is None else [score]
        self._emit(Delta(request_id=request.id, token_ids=[token], text=text, logprobs=scores))
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
        self.scheduler.speculation.forget(request.id)

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
        """Tell how far a request is: each new phase, then at most every `PROGRESS_S` seconds."""
        at = now()
        last_phase, last_at = self._progress.get(request.id, ("", 0.0))
        if phase == last_phase and at - last_at < PROGRESS_S:
            return
        self._progress[request.id] = (phase, at)
        self._emit(Status(request_id=request.id, phase=phase, done=done, total=total))
