"""Shared prefixes and resident chats: what can be used again without computing it."""

from __future__ import annotations

import enum
import hashlib
from collections import OrderedDict

import numpy as np

from engine.memory.page_pool import PagePool
from engine.memory.sequence import DIGEST_BYTES, Sequence


class NodeState(enum.Enum):
    ABSENT = "absent"  # no pages
    LOADING = "loading"  # pages held, K/V being restored or computed
    READY = "ready"


class PrefixNode:
    """A shared prefix: one physical copy of K/V for every chat that begins with these ids."""

    def __init__(self, digest: str, ids: list[int]) -> None:
        self.digest = digest
        self.ids = ids
        self.hash = np.array(ids, dtype="<i4").tobytes()
        self.seq = Sequence(f"p-{digest}", list(ids), 0, b"")
        self.state = NodeState.ABSENT
        self.users = 0  # requests that run on it; pinned while there are any
        self.last_used = 0.0

    def __len__(self) -> int:
        return len(self.ids)


class PrefixTree:
    """Owns the nodes and the resident chats below them. Scheduler only.

    A node is keyed by its token ids, which belong to an assistant's version; below a node, chats
    are keyed by chat id, so that the private text of one chat is never matched against another's.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, PrefixNode] = {}
        self.chats: OrderedDict[str, tuple[PrefixNode | None, Sequence, float]] = OrderedDict()

    def node(self, ids: list[int]) -> PrefixNode | None:
        """The node of these ids, made ABSENT when there is none; None for an empty prefix."""
        if not ids:
            return None
        data = np.array(ids, dtype="<i4").tobytes()
        digest = hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()
        node = self.nodes.get(digest)
        if node is None:
            node = self.nodes[digest] = PrefixNode(digest, ids)
        return node

    def keep(self, chat_id: str, node: PrefixNode | None, seq: Sequence, now: float) -> None:
        """Hold a chat's sequence as resident, most recently used."""
        self.chats[chat_id] = (node, seq, now)
        self.chats.move_to_end(chat_id)

    def take(self, chat_id: str) -> tuple[PrefixNode | None, Sequence] | None:
        """Hand a resident chat's sequence to the caller, who owns its pages from then on."""
        entry = self.chats.pop(chat_id, None)
        return None if entry is None else entry[:2]

    def oldest_chat(self) -> tuple[str, float] | None:
        """The least recently used resident chat, and when it was used (seconds, monotonic)."""
        return next(((chat, entry[2]) for chat, entry in self.chats.items()), None)

    def evict_chat(self, chat_id: str, pool: PagePool) -> None:
        """Give a resident chat's pages back; its chunks are on disk already."""
        entry = self.chats.pop(chat_id)
        entry[1].release(pool)

    def evict_node(self, pool: PagePool) -> bool:
        """Give back the pages of the least recently used node without users; False if none.

        Resident chats below it keep their own pages: they wait for the node when they go on.
        """
        idle = [n for n in self.nodes.values() if n.users == 0 and n.state is NodeState.READY]
        if not idle:
            return False
        node = min(idle, key=lambda n: n.last_used)
        node.seq.release(pool)
        node.state = NodeState.ABSENT
        del self.nodes[node.digest]
        return True

    def held(self) -> list[list[int]]:
        """Page lists of everything that the tree holds, for the pool's check."""
        return [n.seq.page_ids for n in self.nodes.values()] + [
            entry[1].page_ids for entry in self.chats.values()
        ]
