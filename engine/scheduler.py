"""Who runs in the next step, and who holds which memory."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from engine.batch import Segment
from engine.chunking import ChunkSize
from engine.memory.kv_cache import KVCache
from engine.memory.page_pool import PagePool, pages_for
from engine.memory.prefix_tree import NodeState, PrefixNode, PrefixTree
from engine.memory.sequence import common_length
from engine.request import NodeLoad, Request, State, WarmLoad, Work, now
from engine.residency import Prefix, Residency
from engine.restoration.restore import RestoreJob
from engine.restoration.restorer import Restorer
from engine.speculation import Speculation

logger = logging.getLogger(__name__)


class Scheduler:
    """Owns the queue, the running work and what is resident. Engine thread only.

    Requests start in order of arrival, as soon as their whole prompt fits; decode rows come first
    in a step, then prefill up to a budget of tokens. When a decode row finds no page, idle chats
    are evicted (they are on disk already), then prefixes without users, then the youngest request
    is preempted and starts again from its checkpoint.
    """

    def __init__(
        self,
        pool: PagePool,
        cache: KVCache,
        restorer: Restorer,
        *,
        max_batch: int,
        prefill_chunk: int,
        speculation: Speculation,
    ) -> None:
        self.resident = Residency(pool, cache, restorer)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission, the youngest last
        self.node_loads: list[NodeLoad] = []
        self.warm_loads: dict[str, WarmLoad] = {}
        self.preemptions = 0
        self._restorer = restorer
        self._max_batch = max_batch
        self.chunk = ChunkSize(prefill_chunk)
        self.speculation = speculation

    @property
    def pool(self) -> PagePool:
        return self.resident.pool

    @property
    def tree(self) -> PrefixTree:
        return self.resident.tree

    # -- admission -----------------------------------------------------------------------------

    def admit(self) -> list[Request]:
        """Start waiting requests while there is room; returns those that started."""
        started: list[Request] = []
        for request in list(self.waiting):
            if len(self.running) >= self._max_batch:
                break
            if self._sibling_reads(request):
                continue
            if not self._start(request):
                break
            self.waiting.remove(request)
            self.running.append(request)
            started.append(request)
        return started

    def _sibling_reads(self, request: Request) -> bool:
        """Whether the prompt of another candidate, the same tokens, is on its way into memory."""
        return any(
            other.chat_id == request.chat_id and other.state is not State.DECODE
            for other in self.running
        )

    def _start(self, request: Request) -> bool:
        """Give a request its pages and begin its restore; False, and no change, without room."""
        submit = request.submit
        prefix = self.resident.prefix(submit.prefix_scope, submit.prefix_ids)
        if prefix is None or not self._load_prefix(prefix, request):
            return False
        warm = self.warm_loads.pop(request.chat_id, None)
        ids = request.ids
        if warm is not None:
            if self._adopt(warm, request, prefix):
                return True
            self.resident.end(warm)
        if not self.resident.begin(
            request, request.chat_id, prefix, ids, self._evict_idle, saves=submit.saves
        ):
            return False
        seq = request.sequence
        first = self._admitted(request)
        if first:
            request.resident_tokens = seq.offset + seq.num_computed
        end = request.history_end - seq.offset if first else len(seq) - 1
        request.restore = self._restorer.begin(seq, request.path, seq.num_computed, end)
        if request.restore is None:
            self._prefill_from(request, [(seq.num_computed, len(seq))])
        else:
            request.state = State.RESTORING
        return True

    @staticmethod
    def _admitted(request: Request) -> bool:
        """Note when a request began; False when it was preempted and begins again."""
        if request.timing.admitted is not None:
            return False
        request.timing.admitted = now()
        return True

    def _adopt(self, warm: WarmLoad, request: Request, prefix: Prefix) -> bool:
        """Go on with a warm-up in progress, if its tokens are those of the request's history.

        Otherwise the warm-up's restore ends. False also without room.
        """
        seq, ids = warm.sequence, request.ids
        own = ids[seq.offset :]
        fits = (
            request.submit.saves
            and warm.prefix_digest == prefix.digest.value
            and common_length(seq.ids, own) == len(seq) < len(own)
            and warm.restore is not None
        )
        while fits and not seq.reserve(len(own) + 1, self.pool):
            fits = self._evict_idle()
        if not fits:
            if warm.restore is not None:
                warm.restore.cancel()
            return False
        seq.ids = own
        request.path, request.tail, request.restore = warm.path, warm.tail, warm.restore
        for node in request.path:
            node.users.discard(warm)
            node.users.add(request)
        assert request.tail is not None, "a warm-up has no tail"
        request.tail.tail_of = request
        self._admitted(request)
        request.state = State.RESTORING
        return True

    def _load_prefix(self, prefix: Prefix, requester: Request | None) -> bool:
        """Begin to bring in what is missing of a prefix; False without room."""
        for i, node in enumerate(prefix.nodes):
            if node.state is NodeState.ABSENT and not self._load(node, prefix.nodes[:i], requester):
                self.resident.forget_absent(prefix)
                return False
        return True

    def _load(self, node: PrefixNode, path: list[PrefixNode], requester: Request | None) -> bool:
        """Give a node its pages and begin to bring it in; False without room."""
        load = NodeLoad(node, path, requester)
        for above in path:
            above.users.add(load)
        while not node.seq.reserve(len(node), self.pool):
            if not self._evict_idle():
                for above in path:
                    above.users.discard(load)
                return False
        node.state = NodeState.LOADING
        load.restore = self._restorer.begin(node.seq, path, 0, len(node))
        self.node_loads.append(load)
        if load.restore is None:
            self._prefill_from(load, [(0, len(node))])
        else:
            load.state = State.RESTORING
        return True

    def warm(
        self, chat_id: str, prefix_scope: str, prefix_ids: list[int], history_ids: list[int]
    ) -> None:
        """Begin to restore an idle chat, if free pages suffice and something is on disk."""
        busy = any(r.chat_id == chat_id for r in (*self.waiting, *self.running))
        if busy or chat_id in self.warm_loads or not history_ids:
            return
        prefix = self.resident.prefix(prefix_scope, prefix_ids)
        if prefix is None:
            return
        absent = [node for node in prefix.nodes if node.state is NodeState.ABSENT]
        need = pages_for(len(history_ids) + 1) + sum(pages_for(len(node)) for node in absent)
        if need > self.pool.num_free:
            self.resident.forget_absent(prefix)
            return
        if not self._load_prefix(prefix, None):
            return
        load = WarmLoad(chat_id)
        load.prefix_digest = prefix.digest.value
        if not self.resident.begin(load, chat_id, prefix, history_ids, lambda: False):
            return
        seq = load.sequence
        load.restore = self._restorer.begin(seq, load.path, seq.num_computed, len(seq))
        if load.restore is None:
            self.resident.end(load)
        else:
            load.state = State.RESTORING
            self.warm_loads[chat_id] = load

    # -- restoring -----------------------------------------------------------------------------

    def restoring(self) -> Iterator[Work]:
        """Work whose chunks are being read: prefixes first, warm-ups last."""
        for work in (*self.node_loads, *self.running, *self.warm_loads.values()):
            if work.state is State.RESTORING:
                yield work

    def restored(self, work: Work) -> None:
        """A restore ended: what is still missing will be computed."""
        job, seq = work.restore, work.sequence
        assert job is not None, "work without a restore was reported restored"
        work.restore = None
        base = seq.num_computed
        holes = job.missing(base, len(seq.ids))
        seq.num_computed = seq.num_saved = holes[0][0] if holes else len(seq.ids)
        if isinstance(work, WarmLoad):
            self.warm_loads.pop(work.chat_id)
            self.resident.end(work)
            return
        self._account(work, job, base, holes)
        self._prefill_from(work, holes)

    def _account(
        self, work: Work, job: RestoreJob, base: int, holes: list[tuple[int, int]]
    ) -> None:
        if isinstance(work, NodeLoad):
            if work.requester is not None:
                work.requester.prefix_restored_tokens += job.tokens_done
            return
        if not isinstance(work, Request) or work.preemptions:
            return
        end = work.history_end - work.sequence.offset
        missing = sum(min(b, end) - a for a, b in holes if a < end)
        work.restored_tokens = max(0, end - base - missing)
        work.restore_ms, work.restore_io_ms = job.wall_ms, job.io_ms
        work.restore_compute_ms = job.compute_s * 1e3
        work.restore_bytes = job.bytes_read
        work.restore_method = "+".join(sorted(job.methods))
        work.restore_plan = job.plan
        work.restore_predicted_ms = job.predicted.total_ms if job.predicted else None
        work.restore_spans = job.spans
        work.restored_from_memory = job.tokens_from_memory

    def _prefill_from(self, work: Work, todo: list[tuple[int, int]]) -> None:
        work.todo = todo
        work.state = State.PREFILL
        if isinstance(work, Request) and not work.preemptions:
            end = work.history_end - work.sequence.offset
            work.recomputed_tokens = sum(min(b, end) - a for a, b in todo if a < end)
        if not todo:
            self.prefilled(work)

    # -- one step ------------------------------------------------------------------------------

    def schedule(self) -> tuple[dict[Segment, Request], dict[Segment, Work]]:
        """The decode and the prefill segments of the next step, each with its work."""
        decode: dict[Segment, Request] = {}
        for request in list(self.running):
            if request.state is not State.DECODE:
                continue
            seq = request.sequence
            while request.state is State.DECODE and not seq.reserve(len(seq.ids), self.pool):
                if not self._evict_idle():
                    self._preempt(self.running[-1])
            if request.state is State.DECODE:
                end = len(seq.ids)
                decode[Segment(seq, tuple(request.path), end - 1, end, True)] = request
        # a request that was preempted after its row was scheduled holds no pages any more
        decode = {s: r for s, r in decode.items() if r.state is State.DECODE}
        prefill = self._schedule_prefill(self.chunk.tokens(bool(decode)))
        return decode if prefill else self._with_drafts(decode), prefill

    def _with_drafts(self, decode: dict[Segment, Request]) -> dict[Segment, Request]:
        """Segments that also run what may come next, where there are pages for it."""
        drafts = self.speculation.drafts(list(decode.values()))
        drafted: dict[Segment, Request] = {}
        for segment, request in decode.items():
            draft = drafts.get(request, ())
            end = segment.end + len(draft)
            if draft and segment.seq.reserve(end, self.pool):
                segment = replace(segment, end=end, draft=tuple(draft))
            drafted[segment] = request
        return drafted

    def _schedule_prefill(self, budget: int) -> dict[Segment, Work]:
        prefill: dict[Segment, Work] = {}
        for work in (*self.node_loads, *self.running):
            if budget == 0:
                break
            if work.state is not State.PREFILL or work.blocked:
                continue
            start, end = work.todo[0]
            stop = min(end, start + budget)
            last = len(work.todo) == 1 and stop == end
            wants = last and isinstance(work, Request)
            prefill[Segment(work.sequence, tuple(work.path), start, stop, wants)] = work
            budget -= stop - start
        return prefill

    def prefilled(self, work: Work) -> None:
        """All tokens of this work have K/V."""
        if isinstance(work, NodeLoad):
            self.node_loads.remove(work)
            assert work.tail is not None, "a load has no node"
            work.tail.state = NodeState.READY
            work.tail.last_used = now()
            self._restorer.flush(work.sequence)
            self._restorer.drop(work.sequence)
            self.resident.leave(work)
        else:
            work.state = State.DECODE

    # -- giving memory back --------------------------------------------------------------------

    def finish(self, request: Request) -> None:
        """The request ended: its chunks are flushed and its chat stays resident."""
        self.running.remove(request)
        seq = request.sequence
        if request.restore is not None:
            request.restore.cancel()
            request.restore = None
        self.resident.truncate(seq, seq.num_computed)
        self._restorer.flush(seq)
        self.resident.end(request)

    def forget(self, chat_id: str) -> None:
        """Drop what is resident of a chat that is not running."""
        warm = self.warm_loads.pop(chat_id, None)
        if warm is not None:
            self._end_warm(warm)
        if chat_id in self.tree.chats:
            self.resident.evict(chat_id)

    def reset(self) -> None:
        """Drop all work and all memory after a step failed; nothing of it can be trusted."""
        for work in (*self.node_loads, *self.running, *self.warm_loads.values()):
            if work.restore is not None:
                work.restore.cancel()
        self.resident.clear()
        self.waiting.clear()
        self.running.clear()
        self.node_loads.clear()
        self.warm_loads.clear()

    def check(self) -> None:
        """Assert that every page is held by exactly those that should hold it."""
        self.resident.check()

    def _end_warm(self, warm: WarmLoad) -> None:
        if warm.restore is not None:
            warm.restore.cancel()
        self.resident.drop(warm)

    def _evict_idle(self) -> bool:
        """Free some memory that nobody runs on: a warm-up, a resident chat or an unused prefix."""
        if self.warm_loads:
            _, warm = self.warm_loads.popitem()
            self._end_warm(warm)
            return True
        return self.resident.evict_one()

    def _preempt(self, request: Request) -> None:
        """Take a running request's memory; it starts again, first in the queue."""
        self.preemptions += 1
        request.preemptions += 1
        self.running.remove(request)
        if request.restore is not None:
            request.restore.cancel()
            request.restore = None
        self._restorer.flush(request.sequence)
        self.resident.drop(request)
        request.todo = []
        request.state = State.WAITING
        self.waiting.appendleft(request)
        logger.info("preempted request %s: no free page", request.id)
