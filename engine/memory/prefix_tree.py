"""What can be used again without computing it: shared prefixes, and chats with their branches."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from engine.memory.page_pool import PAGE_SIZE
from engine.memory.sequence import IdDigest, Sequence, common_length


class NodeState(enum.Enum):
    ABSENT = "absent"  # no pages
    LOADING = "loading"  # pages held, K/V being restored or computed
    READY = "ready"


class Reader(Protocol):
    """Work that attends to nodes."""

    path: list[PrefixNode]


class Root:
    """Where the tree of one owner begins: an assistant's prefixes, or a chat's history.

    A chat's history lies behind a prefix: `position` tokens, whose digest is `before`, of the
    owner `behind`.
    """

    def __init__(self, owner: str, position: int, before: IdDigest, behind: str = "") -> None:
        self.owner = owner
        self.behind = behind
        self.position = position
        self.before = before
        self.children: list[PrefixNode] = []
        self.last_used = 0.0

    def nodes(self) -> Iterator[PrefixNode]:
        """All nodes, a parent before its children."""
        left = list(self.children)
        while left:
            node = left.pop()
            yield node
            left.extend(node.children)


class PrefixNode:
    """One physical copy of the K/V of a run of tokens, for all who go on behind it.

    A node with `tail_of` is the end of a running request's sequence and grows with it; others are
    READY in full, or hold nothing. A node with children is whole pages long.
    """

    def __init__(self, seq: Sequence, parent: Root | PrefixNode) -> None:
        self.seq = seq
        self.parent = parent
        self.children: list[PrefixNode] = []
        self.state = NodeState.READY
        self.users: set[Reader] = set()  # work with this node in its path; pinned by them
        self.tail_of: Reader | None = None
        self.last_used = 0.0

    def __len__(self) -> int:
        return len(self.seq)

    @property
    def idle(self) -> bool:
        """Whether nobody runs on it or behind it, so that its pages may be given back."""
        return not (self.children or self.users or self.tail_of) and (
            self.state is not NodeState.LOADING
        )


class PrefixTree:
    """Owns the roots and the nodes below them. Scheduler only.

    Prefixes are shared within a scope (an assistant), a chat's history within the chat, and
    nothing else: the private text of one chat is never matched against another's.
    """

    def __init__(self) -> None:
        self.prefixes: dict[str, Root] = {}
        self.chats: OrderedDict[str, Root] = OrderedDict()  # least recently used first

    def scope(self, name: str) -> Root:
        """The root of an assistant's prefixes."""
        root = self.prefixes.get(name)
        if root is None:
            root = self.prefixes[name] = Root(f"p-{name}", 0, IdDigest())
        return root

    def add(self, parent: Root | PrefixNode, ids: list[int]) -> PrefixNode:
        """A new node behind a root or a node; its owner and place follow from the parent."""
        if isinstance(parent, Root):
            seq = Sequence(parent.owner, ids, parent.position, parent.before)
        else:
            above = parent.seq
            seq = Sequence(
                above.owner,
                ids,
                above.position + len(above),
                above.digest_after(),
                above.offset + len(above),
            )
        node = PrefixNode(seq, parent)
        parent.children.append(node)
        return node

    def split(self, node: PrefixNode, num_tokens: int) -> PrefixNode:
        """Make the first tokens of a node, whole pages, a node of their own above it.

        Moves no K/V. Whoever reads the node reads both from now on.
        """
        upper = PrefixNode(node.seq.split(num_tokens), node.parent)
        upper.state, upper.last_used = node.state, node.last_used
        upper.children = [node]
        siblings = node.parent.children
        siblings[siblings.index(node)] = upper
        node.parent = upper
        for reader in node.users:
            reader.path.insert(reader.path.index(node), upper)
            upper.users.add(reader)
        if node.tail_of is not None:
            node.tail_of.path.append(upper)
            upper.users.add(node.tail_of)
        return upper

    def remove(self, node: PrefixNode) -> None:
        """Take a leaf out; its pages are the caller's to give back."""
        assert not node.children, "a node with children was removed"
        node.parent.children.remove(node)

    def nodes(self) -> Iterator[PrefixNode]:
        for root in (*self.prefixes.values(), *self.chats.values()):
            yield from root.nodes()

    def held(self) -> list[list[int]]:
        """Page lists of everything that the tree holds, for the pool's check."""
        return [node.seq.page_ids for node in self.nodes()]


def closest(
    parent: Root | PrefixNode, ids: list[int], computed: bool, saves: bool = False
) -> tuple[PrefixNode | None, int]:
    """The child that has the most tokens in common with `ids`, and how many.

    Of several, one that ends there. With `computed`, only tokens that have K/V count; with
    `saves`, only children that are checkpointed.
    """
    best: PrefixNode | None = None
    most = 0
    for child in parent.children:
        if saves and not child.seq.saves:
            continue
        held = child.seq.ids[: child.seq.num_computed] if computed else child.seq.ids
        common = common_length(held, ids)
        if common > most or 0 < common == most == len(held):
            best, most = child, common
    return best, most


def whole_pages(num_tokens: int) -> int:
    """The part of a number of tokens that fills pages."""
    return num_tokens // PAGE_SIZE * PAGE_SIZE
