"""What stays in memory between turns, and what gives way when memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.memory.kv_cache import KVCache
from engine.memory.page_pool import PAGE_SIZE, PagePool
from engine.memory.prefix_tree import (
    NodeState,
    PrefixNode,
    PrefixTree,
    Root,
    closest,
    whole_pages,
)
from engine.memory.sequence import IdDigest, Sequence
from engine.request import Work, now
from engine.restoration.restorer import Restorer


@dataclass(frozen=True)
class Prefix:
    """The nodes of a prefix, from its root, and its identity."""

    nodes: list[PrefixNode]
    length: int
    digest: IdDigest


class Residency:
    """Owns the page pool and the prefix tree, as a part of the scheduler. Engine thread only.

    Idle chats give way first (they are on disk already), then unused branches of running chats,
    then prefixes without users.
    """

    def __init__(self, pool: PagePool, cache: KVCache, restorer: Restorer) -> None:
        self.pool = pool
        self.tree = PrefixTree()
        self.evictions = 0
        self._cache = cache
        self._restorer = restorer

    # -- prefixes ------------------------------------------------------------------------------

    def prefix(self, scope: str, ids: list[int]) -> Prefix | None:
        """The nodes that hold exactly these ids, made where there are none.

        Prefixes of a scope share the whole pages that they have in common. None while a node that
        would have to be split for that is being loaded.
        """
        nodes: list[PrefixNode] = []
        digest = IdDigest(ids)
        parent: Root | PrefixNode = self.tree.scope(scope)
        at = 0
        while at < len(ids):
            rest = ids[at:]
            found, common = closest(parent, rest, computed=False)
            if found is not None and common < max(len(found), len(rest)):
                common = whole_pages(common)
            if found is None or common == 0:
                node = self.tree.add(parent, rest)
                node.state = NodeState.ABSENT
            elif common == len(found):
                node = found
            elif found.state is NodeState.LOADING:
                return None
            else:
                node = self.tree.split(found, common)
            nodes.append(node)
            parent = node
            at += len(node)
        return Prefix(nodes, len(ids), digest)

    def forget_absent(self, prefix: Prefix) -> None:
        """Take out nodes that hold nothing and are not being brought in."""
        for node in reversed(prefix.nodes):
            if node.state is NodeState.ABSENT and node.idle:
                self._drop(node)

    # -- chats ---------------------------------------------------------------------------------

    def begin(
        self,
        work: Work,
        chat_id: str,
        prefix: Prefix,
        ids: list[int],
        evict: Callable[[], bool],
        *,
        saves: bool = True,
    ) -> bool:
        """Give work its path and its tail below what the chat has in memory already.

        At most len(ids) - 1 tokens are taken over: the last one has to be run. `evict` gives some
        memory back, or says that there is nothing to give. Work that `saves` takes over only what
        is saved; other work changes nothing of that. False, and no change, without enough pages
        for all of `ids` and one more.
        """
        root = self._chat(chat_id, prefix)
        if root is None:
            return False
        work.path = list(prefix.nodes)
        for node in prefix.nodes:
            node.users.add(work)
        limit = len(ids) - 1
        parent: Root | PrefixNode = root
        tail: PrefixNode | None = None
        source: tuple[PrefixNode, int] | None = None
        at = 0
        while True:
            found, common = closest(parent, ids[at:limit], computed=True, saves=saves)
            if found is None:
                break
            own = found.seq.saves is saves
            if own and found.idle and len(found) - common < PAGE_SIZE:
                self.truncate(found.seq, common)
                tail = found
                break
            if found.tail_of is None and common == len(found) == whole_pages(common):
                node = found
            elif whole_pages(common):
                node = self.tree.split(found, whole_pages(common))
            else:
                source = found, common
                found.users.add(work)
                break
            work.path.append(node)
            node.users.add(work)
            parent = node
            at += len(node)
        if tail is None:
            tail = self.tree.add(parent, [])
            tail.seq.saves = saves
        tail.tail_of = work
        work.tail = tail
        self._absorb(work, root)
        work.sequence.ids = ids[work.sequence.offset :]
        seq = work.sequence
        enough = True
        while enough and not seq.reserve(len(seq) + 1, self.pool):
            enough = evict()
        if source is not None:
            source[0].users.discard(work)
            if enough:
                self._copy(source[0].seq, seq, source[1])
        if not enough:
            self.end(work)
        return enough

    def _chat(self, chat_id: str, prefix: Prefix) -> Root | None:
        """The chat's root behind this prefix; None while the chat runs behind another one."""
        root = self.tree.chats.get(chat_id)
        if root is not None and root.before.value != prefix.digest.value:
            if any(node.tail_of for node in root.nodes()):
                return None
            self.evict(chat_id)
            root = None
        if root is None:
            behind = prefix.nodes[0].seq.owner if prefix.nodes else ""
            root = Root(f"c-{chat_id}", prefix.length, prefix.digest, behind)
            self.tree.chats[chat_id] = root
        return root

    def _absorb(self, work: Work, root: Root) -> None:
        """Make nodes above the tail that nobody else needs any more a part of it again."""
        tail = work.tail
        assert tail is not None, "work without a tail has nothing to absorb"
        while (above := tail.parent) is not root:
            assert isinstance(above, PrefixNode), "a chat's node hangs below another chat"
            if len(above.children) > 1 or above.users != {work}:
                break
            if above.seq.saves is not tail.seq.saves:
                break
            tail.seq.join(above.seq)
            work.path.remove(above)
            siblings = above.parent.children
            siblings[siblings.index(above)] = tail
            tail.parent = above.parent

    def _copy(self, source: Sequence, target: Sequence, num_tokens: int) -> None:
        """Copy the K/V of a branch's left-over tokens, fewer than a page, into its first page."""
        self._cache.copy_tokens(source.page_ids[0], target.page_ids[0], num_tokens)
        target.num_computed = num_tokens

    def end(self, work: Work) -> None:
        """Work ended: what it has K/V for is kept until the chat goes on or has to give way."""
        tail = work.tail
        assert tail is not None, "work without a tail ended"
        self.truncate(tail.seq, tail.seq.num_computed)
        tail.tail_of = None
        tail.last_used = now()
        self.leave(work)
        if not tail.seq.ids:
            self._drop(tail)
        self._settle(tail.seq.owner)

    def drop(self, work: Work) -> None:
        """Work gives up its tail and leaves its path."""
        tail = work.tail
        assert tail is not None, "work without a tail was dropped"
        tail.tail_of = None
        self._drop(tail)
        self.leave(work)
        self._settle(tail.seq.owner)

    def leave(self, work: Work) -> None:
        """Work goes away from its path."""
        at = now()
        for node in work.path:
            node.users.discard(work)
            node.last_used = at
        work.path, work.tail = [], None

    def _settle(self, owner: str) -> None:
        """A chat's work ended: it is the most recently used one, unless nothing is left of it."""
        chat_id = owner.removeprefix("c-")
        root = self.tree.chats[chat_id]
        root.last_used = now()
        self.tree.chats.move_to_end(chat_id)
        self._forget_empty(chat_id)

    # -- giving way ----------------------------------------------------------------------------

    def truncate(self, seq: Sequence, num_tokens: int) -> None:
        """Cut a sequence, and what is staged of it."""
        self._restorer.truncate(seq, num_tokens)
        seq.truncate(num_tokens, self.pool)

    def _drop(self, node: PrefixNode) -> None:
        self._restorer.keep(node.seq)
        self._restorer.drop(node.seq)
        node.seq.release(self.pool)
        self.tree.remove(node)

    def evict(self, chat_id: str) -> None:
        """Give back all that a chat holds and nobody runs on."""
        root = self.tree.chats[chat_id]
        for node in reversed(list(root.nodes())):  # children before their parents
            if node.idle:
                self._drop(node)
        self._forget_empty(chat_id)
        self.evictions += 1

    def _forget_empty(self, chat_id: str) -> None:
        if not self.tree.chats[chat_id].children:
            del self.tree.chats[chat_id]

    def idle_chats(self) -> list[str]:
        """Chats in memory that nobody runs on, least recently used first."""
        return [chat for chat, root in self.tree.chats.items() if _unused(root)]

    def oldest_chat(self) -> tuple[str, float] | None:
        """The least recently used idle chat, and when it was used (seconds of `now`)."""
        for chat, root in self.tree.chats.items():
            if _unused(root):
                return chat, root.last_used
        return None

    def evict_older_than(self, limit: float) -> None:
        """Evict chats last used before `limit` (seconds of `now`)."""
        while (oldest := self.oldest_chat()) is not None and oldest[1] < limit:
            self.evict(oldest[0])

    def evict_one(self) -> bool:
        """Evict the least recently used chat, else a branch, else a prefix; False: nothing left."""
        oldest = self.oldest_chat()
        if oldest is not None:
            self.evict(oldest[0])
            return True
        for roots in (self.tree.chats, self.tree.prefixes):
            idle = [
                node
                for root in roots.values()
                for node in root.nodes()
                if node.idle and node.seq.page_ids
            ]
            if idle:
                self._drop(min(idle, key=lambda node: node.last_used))
                return True
        return False

    def clear(self) -> None:
        """Give everything back; nothing of it can be trusted."""
        for node in self.tree.nodes():
            self._restorer.drop(node.seq)
            node.seq.release(self.pool)
        self.tree = PrefixTree()

    def check(self) -> None:
        """Assert that every page is held by exactly those that should hold it."""
        self.pool.check(self.tree.held())
        for node in self.tree.nodes():
            assert node in node.parent.children, "a node's parent does not know it"
            assert all(node in user.path for user in node.users), "a user does not know its node"
            assert not node.children or len(node) % PAGE_SIZE == 0, (
                f"a node of {len(node)} tokens has children"
            )


def _unused(root: Root) -> bool:
    return all(not node.users and node.tail_of is None for node in root.nodes())
