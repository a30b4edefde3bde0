"""Who runs in the next step, and who holds which memory."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator

from engine.batch import Segment
from engine.memory.page_pool import PagePool, pages_for
from engine.memory.prefix_tree import NodeState, PrefixNode, PrefixTree
from engine.memory.sequence import common_length
from engine.request import NodeLoad, Request, State, WarmLoad, Work, now
from engine.residency import Residency, same_prefix
from engine.restoration.restore import RestoreJob
from engine.restoration.restorer import Restorer

logger = logging.getLogger(__name__)


class Scheduler:
    """Owns the queue, the running work and what is resident. Engine thread only.

    Requests start in order of arrival, as soon as their whole prompt fits; decode rows come first
    in a step, then prefill up to a budget of tokens. When a decode row finds no page, idle chats
    are evicted (they are on disk already), then prefixes without users, then the youngest request
    is preempted and starts again from its checkpoint.
    """

    def __init__(
        self, pool: PagePool, restorer: Restorer, *, max_batch: int, prefill_chunk: int
    ) -> None:
        self.resident = Residency(pool, restorer)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission, the youngest last
        self.node_loads: list[NodeLoad] = []
        self.warm_loads: dict[str, WarmLoad] = {}
        self.preemptions = 0
        self._restorer = restorer
        self._max_batch = max_batch
        self._prefill_chunk = prefill_chunk

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
        while self.waiting and len(self.running) < self._max_batch:
            request = self.waiting[0]
            if not self._start(request):
                break
            self.waiting.popleft()
            self.running.append(request)
            started.append(request)
        return started

    def _start(self, request: Request) -> bool:
        """Give a request its pages and begin its restore; False, and no change, without room."""
        node = self.tree.node(request.submit.prefix_ids)
        if node is not None:
            node.users += 1
            if node.state is NodeState.ABSENT and not self._load_node(node, request):
                self._leave_node(node)
                return False
        warm = self._adopt_warm(request, node)
        seq = self.resident.take(request, node) if warm is None else warm.sequence
        ids = request.ids
        seq.ids = ids
        while not seq.reserve(len(ids) + 1, self.pool):
            if not self._evict_idle():
                if warm is not None and warm.restore is not None:
                    warm.restore.cancel()
                self.resident.keep(request.chat_id, node, seq)
                self._leave_node(node)
                return False
        request.node, request.seq = node, seq
        first = request.timing.admitted is None
        if first:
            request.timing.admitted = now()
        if warm is not None:
            request.restore = warm.restore
        else:
            if first:
                request.resident_tokens = seq.num_computed
            end = request.history_end if first else len(ids) - 1
            request.restore = self._restorer.begin(seq, seq.num_computed, end)
        if request.restore is None:
            self._prefill_from(request, [(seq.num_computed, len(ids))])
        else:
            request.state = State.RESTORING
        return True

    def _adopt_warm(self, request: Request, node: PrefixNode | None) -> WarmLoad | None:
        """A warm-up in progress whose tokens are those of the request's history."""
        warm = self.warm_loads.pop(request.chat_id, None)
        if warm is None:
            return None
        seq = warm.sequence
        matches = common_length(seq.ids, request.ids) == len(seq.ids) < len(request.ids)
        if same_prefix(warm.node, node) and matches:
            self._leave_node(warm.node)
            return warm
        self._end_warm(warm, keep=False)
        return None

    def _load_node(self, node: PrefixNode, requester: Request | None) -> bool:
        """Give a prefix its pages and begin to bring it in; False without room."""
        while not node.seq.reserve(len(node), self.pool):
            if not self._evict_idle():
                return False
        load = NodeLoad(node, requester)
        node.state = NodeState.LOADING
        load.restore = self._restorer.begin(node.seq, 0, len(node))
        self.node_loads.append(load)
        if load.restore is None:
            self._prefill_from(load, [(0, len(node))])
        else:
            load.state = State.RESTORING
        return True

    def warm(self, chat_id: str, prefix_ids: list[int], history_ids: list[int]) -> None:
        """Begin to restore an idle chat, if free pages suffice and something is on disk."""
        busy = any(r.chat_id == chat_id for r in (*self.waiting, *self.running))
        if busy or chat_id in self.warm_loads or not history_ids:
            return
        entry = self.tree.chats.get(chat_id)
        if entry is not None and entry[1].num_computed >= len(history_ids) - 1:
            return
        need = pages_for(len(history_ids) + 1) + pages_for(len(prefix_ids))
        if need > self.pool.num_free:
            return
        if entry is not None:
            self.resident.evict(chat_id)
        node = self.tree.node(prefix_ids)
        load = WarmLoad(chat_id)
        load.node, load.seq = node, self.resident.new_sequence(chat_id, node)
        load.seq.ids = list(history_ids)
        if node is not None:
            node.users += 1
            if node.state is NodeState.ABSENT:
                self._load_node(node, None)
        if load.seq.reserve(len(history_ids), self.pool):
            load.restore = self._restorer.begin(load.seq, 0, len(history_ids))
        if load.restore is None:
            self._end_warm(load, keep=False)
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
            self._end_warm(work, keep=True)
            return
        self._account(work, job, base, holes)
        self._prefill_from(work, holes)

    def _account(
        self, work: Work, job: RestoreJob, base: int, holes: list[tuple[int, int]]
    ) -> None:
        if isinstance(work, NodeLoad):
            if work.requester is not None:
                work.requester.prefix_restored_tokens = job.tokens_done
            return
        if not isinstance(work, Request) or work.preemptions:
            return
        end = work.history_end
        missing = sum(min(b, end) - a for a, b in holes if a < end)
        work.restored_tokens = max(0, end - base - missing)
        work.restore_ms, work.restore_io_ms = job.wall_ms, job.io_ms
        work.restore_compute_ms = job.compute_s * 1e3
        work.restore_bytes = job.bytes_read
        work.restore_method = "+".join(sorted(job.methods))

    def _prefill_from(self, work: Work, todo: list[tuple[int, int]]) -> None:
        work.todo = todo
        work.state = State.PREFILL
        if isinstance(work, Request) and not work.preemptions:
            end = work.history_end
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
                decode[Segment(seq, request.node, end - 1, end, True)] = request
        # a request that was preempted after its row was scheduled holds no pages any more
        decode = {s: r for s, r in decode.items() if r.state is State.DECODE}
        return decode, self._schedule_prefill()

    def _schedule_prefill(self) -> dict[Segment, Work]:
        prefill: dict[Segment, Work] = {}
        budget = self._prefill_chunk
        for work in (*self.node_loads, *self.running):
            if budget == 0:
                break
            if work.state is not State.PREFILL:
                continue
            if work.node is not None and work.node.state is not NodeState.READY:
                continue
            start, end = work.todo[0]
            stop = min(end, start + budget)
            last = len(work.todo) == 1 and stop == end
            wants = last and isinstance(work, Request)
            prefill[Segment(work.sequence, work.node, start, stop, wants)] = work
            budget -= stop - start
        return prefill

    def prefilled(self, work: Work) -> None:
        """All tokens of this work have K/V."""
        if isinstance(work, NodeLoad):
            self.node_loads.remove(work)
            work.target.state = NodeState.READY
            work.target.last_used = now()
            self._restorer.flush(work.target.seq)
            self._restorer.drop(work.target.seq)
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
        self.resident.keep(request.chat_id, request.node, seq)
        self._leave_node(request.node)

    def forget(self, chat_id: str) -> None:
        """Drop what is resident of a chat that is not running."""
        warm = self.warm_loads.pop(chat_id, None)
        if warm is not None:
            self._end_warm(warm, keep=False)
        if chat_id in self.tree.chats:
            self.resident.evict(chat_id)

    def reset(self) -> None:
        """Drop all work and all memory after a step failed; nothing of it can be trusted."""
        for work in (*self.node_loads, *self.running, *self.warm_loads.values()):
            if work.restore is not None:
                work.restore.cancel()
            self.resident.drop(work.sequence)
        self.resident.clear()
        self.waiting.clear()
        self.running.clear()
        self.node_loads.clear()
        self.warm_loads.clear()

    def check(self) -> None:
        """Assert that every page is held by exactly those that should hold it."""
        self.resident.check(w.sequence for w in (*self.running, *self.warm_loads.values()))

    def _end_warm(self, warm: WarmLoad, *, keep: bool) -> None:
        if warm.restore is not None:
            warm.restore.cancel()
        if keep:
            self.resident.keep(warm.chat_id, warm.node, warm.sequence)
        else:
            self.resident.drop(warm.sequence)
        self._leave_node(warm.node)

    def _evict_idle(self) -> bool:
        """Free some memory that nobody runs on: a warm-up, a resident chat or an unused prefix."""
        if self.warm_loads:
            _, warm = self.warm_loads.popitem()
            self._end_warm(warm, keep=False)
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
        self.resident.drop(request.sequence)
        self._leave_node(request.node)
        request.node = request.seq = None
        request.todo = []
        request.state = State.WAITING
        self.waiting.appendleft(request)
        logger.info("preempted request %s: no free page", request.id)

    @staticmethod
    def _leave_node(node: PrefixNode | None) -> None:
        if node is not None:
            node.users -= 1
            node.last_used = now()
