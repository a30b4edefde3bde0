"""How many chats in memory the one copy of a prefix is for."""

from __future__ import annotations

from engine.memory.prefix_tree import NodeState, PrefixTree
from engine.messages import PrefixUse


def prefix_uses(tree: PrefixTree) -> tuple[PrefixUse, ...]:
    """What each scope's prefixes hold, and for how many chats, in one pass over both."""
    lengths: dict[str, list[int]] = {}
    for chat in tree.chats.values():
        lengths.setdefault(chat.behind, []).append(chat.position)
    uses = []
    for scope, root in tree.prefixes.items():
        held = sum(len(node) for node in root.nodes() if node.state is not NodeState.ABSENT)
        behind = lengths.get(root.owner, [])
        if held or behind:
            uses.append(
                PrefixUse(scope=scope, held_tokens=held, chats=len(behind), chat_tokens=sum(behind))
            )
    return tuple(uses)
