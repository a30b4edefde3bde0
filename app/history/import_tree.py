"""Foreign trees of messages made into ours, where questions and answers take turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from app.faults import Fault
from sessions.records import MessageStatus, Role

EARLIEST = datetime(1980, 1, 1, tzinfo=UTC)
_TICK = timedelta(microseconds=1)


class ImportFault(Fault):
    """One chat cannot be imported; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A foreign message; without a role it is passed over, and what follows it moves up."""

    parent: str | None
    role: Role | None = None
    text: str = ""
    status: MessageStatus = "complete"
    error: str | None = None
    created_at: datetime | None = None
    completed_at: datetime | None = None


@dataclass(kw_only=True)
class DraftMessage:
    """One of our messages before it has token ids; `parent` is an index before its own."""

    parent: int | None
    role: Role
    text: str
    status: MessageStatus
    error: str | None
    created_at: datetime
    completed_at: datetime | None


@dataclass(kw_only=True)
class Draft:
    """A chat as it will be stored. `lost` counts what could not be taken along, by kind."""

    key: str
    origin_id: str | None
    title: str
    pinned: bool
    created_at: datetime
    updated_at: datetime
    messages: list[DraftMessage]
    active_leaf: int
    lost: Counter[str] = field(default_factory=Counter)


def draft_tree(
    nodes: Mapping[str, Node],
    order: Mapping[str, Sequence[str]],
    current: str | None,
    begun: datetime,
    lost: Counter[str],
) -> tuple[list[DraftMessage], int]:
    """Our messages, parents first, and the index of the active leaf.

    `order` has the children of a node in their order. Neighbours of one role become one message;
    an answer before the first question is left out; a question without an answer gets an empty,
    interrupted one, which can be tried again. Raises ImportFault when nothing is left.
    """
    children = _kept_children(nodes, order)
    made: list[DraftMessage] = []
    place: dict[str, int] = {}  # of the message that a node is part of
    youngest: dict[int | None, datetime] = {}
    stack: list[tuple[str, int | None, tuple[str, ...]]] = [
        (root, None, ()) for root in reversed(children.get(None, []))
    ]
    while stack:
        name, parent, before = stack.pop()
        node = nodes[name]
        below = children.get(name, [])
        if parent is None and node.role == "assistant":
            lost["answers before the first question"] += 1
            stack += [(child, None, ()) for child in reversed(below)]
            continue
        chain = (*before, name)
        same = [child for child in below if nodes[child].role == node.role]
        other = [child for child in below if nodes[child].role != node.role]
        stack += [(child, parent, chain) for child in reversed(same)]
        if other or not same:
            at = _add(made, youngest, parent, [nodes[part] for part in chain], begun)
            place |= dict.fromkeys(chain, at)
            stack += [(child, at, ()) for child in reversed(other)]
    if not made:
        raise ImportFault("it has no message that can be taken over.")
    _answer_questions(made)
    return made, _active(nodes, place, made, current)


def _kept_children(
    nodes: Mapping[str, Node], order: Mapping[str, Sequence[str]]
) -> dict[str | None, list[str]]:
    """The children of each node that counts (of None: the roots), over those that do not."""
    direct: dict[str | None, list[str]] = {}
    for name, node in nodes.items():
        parent = node.parent if node.parent in nodes else None
        direct.setdefault(parent, []).append(name)
    for parent, names in direct.items():
        if parent is not None and parent in order:
            rank = {name: number for number, name in enumerate(order[parent])}
            names.sort(key=lambda name: rank.get(name, len(rank)))
    found: dict[str | None, list[str]] = {}
    stack: list[tuple[str, str | None]] = [(name, None) for name in reversed(direct.get(None, []))]
    while stack:
        name, kept = stack.pop()
        if nodes[name].role is not None:
            found.setdefault(kept, []).append(name)
            kept = name
        stack += [(child, kept) for child in reversed(direct.get(name, []))]
    return found


def _add(
    made: list[DraftMessage],
    youngest: dict[int | None, datetime],
    parent: int | None,
    parts: Sequence[Node],
    begun: datetime,
) -> int:
    """Append a message made of neighbours of one role; never earlier than what it follows."""
    first, last = parts[0], parts[-1]
    floor = EARLIEST
    if parent is not None:  # a question and its answer may have one time
        floor = made[parent].created_at + (_TICK if first.role == "user" else timedelta(0))
    if parent in youngest:
        floor = max(floor, youngest[parent] + _TICK)
    created = max(first.created_at or begun, floor)
    youngest[parent] = created
    assert last.role is not None
    made.append(
        DraftMessage(
            parent=parent,
            role=last.role,
            text="\n\n".join(part.text for part in parts if part.text),
            status=last.status if last.role == "assistant" else "complete",
            error=last.error,
            created_at=created,
            completed_at=max(last.completed_at or last.created_at or created, created),
        )
    )
    return len(made) - 1


def _answer_questions(made: list[DraftMessage]) -> None:
    answered = {message.parent for message in made}
    for at, message in enumerate(list(made)):
        if message.role == "user" and at not in answered:
            made.append(
                DraftMessage(
                    parent=at,
                    role="assistant",
                    text="",
                    status="interrupted",
                    error="This question had no answer when it was imported.",
                    created_at=message.created_at,
                    completed_at=message.created_at,
                )
            )


def _active(
    nodes: Mapping[str, Node],
    place: Mapping[str, int],
    made: Sequence[DraftMessage],
    current: str | None,
) -> int:
    """The leaf at or below the current node, or the last one."""
    seen = set()
    while current is not None and current not in place and current not in seen:
        seen.add(current)
        current = nodes[current].parent if current in nodes else None
    at = place.get(current, len(made) - 1) if current is not None else len(made) - 1
    last_child: dict[int | None, int] = {}
    for index, message in enumerate(made):
        last_child[message.parent] = index
    while at in last_child:
        at = last_child[at]
    return at
