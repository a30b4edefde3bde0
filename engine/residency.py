"""What stays in memory between turns, and what gives way when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator

from engine.memory.page_pool import PagePool
from engine.memory.prefix_tree import PrefixNode, PrefixTree
from engine.memory.sequence import Sequence, common_length
from engine.request import Request, now
from engine.restoration.restorer import Restorer


class Residency:
    """Owns the page pool and the prefix tree, as a part of the scheduler. Engine thread only.

    Idle chats give way first (they are on disk already), then prefixes without users.
    """

    def __init__(self, pool: PagePool, restorer: Restorer) -> None:
        self.pool = pool
        self.tree = PrefixTree()
        self.evictions = 0
        self._restorer = restorer

    def take(self, request: Request, node: PrefixNode | None) -> Sequence:
        """The chat's own sequence, cut to what the request shares with it; else an empty one."""
        entry = self.tree.take(request.chat_id)
        if entry is not None:
            held_node, seq = entry
            if same_prefix(held_node, node):
                ids = request.ids
                common = min(common_length(seq.ids[: seq.num_computed], ids), len(ids) - 1)
                self.truncate(seq, common)
                return seq
            self.drop(seq)
        return self.new_sequence(request.chat_id, node)

    @staticmethod
    def new_sequence(chat_id: str, node: PrefixNode | None) -> Sequence:
        """An empty sequence for a chat below a prefix."""
        position, ancestors = (len(node), node.hash) if node is not None else (0, b"")
        return Sequence(f"c-{chat_id}", [], position, ancestors)

    def keep(self, chat_id: str, node: PrefixNode | None, seq: Sequence) -> None:
        """Hold what a chat has K/V for, until it goes on or has to give way."""
        self.truncate(seq, seq.num_computed)
        if seq.num_computed == 0:
            self.drop(seq)
        else:
            self.tree.keep(chat_id, node, seq, now())

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Cut a sequence, and what is staged of it."""
        self._restorer.truncate(seq, num_tokens)
        seq.truncate(num_tokens, self.pool)

    def drop(self, seq: Sequence) -> None:
        """Give back all that a sequence holds."""
        self._restorer.drop(seq)
        seq.release(self.pool)

    def evict(self, chat_id: str) -> None:
        """Give back all that a resident chat holds."""
        self._restorer.drop(self.tree.chats[chat_id][1])
        self.tree.evict_chat(chat_id, self.pool)
        self.evictions += 1

    def evict_older_than(self, limit: float) -> None:
        """Evict chats last used before `limit` (monotonic seconds)."""
        while (oldest := self.tree.oldest_chat()) is not None and oldest[1] < limit:
            self.evict(oldest[0])

    def evict_one(self) -> bool:
        """Evict the least recently used chat, or else a prefix; False when there is neither."""
        oldest = self.tree.oldest_chat()
        if oldest is not None:
            self.evict(oldest[0])
            return True
        return self.tree.evict_node(self.pool)

    def clear(self) -> None:
        """Give everything back; nothing of it can be trusted."""
        for chat_id in list(self.tree.chats):
            self.evict(chat_id)
        for node in self.tree.nodes.values():
            self.drop(node.seq)
        self.tree = PrefixTree()

    def check(self, others: Iterator[Sequence]) -> None:
        """Assert that every page is held by exactly those that should hold it."""
        self.pool.check([*self.tree.held(), *(seq.page_ids for seq in others)])


def same_prefix(a: PrefixNode | None, b: PrefixNode | None) -> bool:
    """Whether two nodes stand for the same ids; a node may have been evicted and made again."""
    return (a.digest if a is not None else "") == (b.digest if b is not None else "")
