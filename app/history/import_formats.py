"""A chat of a ChatGPT export, or of our own, as a draft of ours.

ChatGPT's `conversations.json` is not documented by its maker; this reads what exports of 2023 to
2026 hold: a list of conversations, each with a `mapping` of node ids to `message`, `parent` and
`children`, and `current_node`. What is not the visible talk of two is counted as lost.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, cast, get_args

from app.history.import_tree import EARLIEST, Draft, ImportFault, Node, draft_tree
from app.message_text import MAX_TITLE_CHARS, title_of
from sessions.records import MessageStatus

# What no text can have: NUL and halves of surrogate pairs.
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
# Places where ChatGPT refers to sources that the export does not hold.
_CITATIONS = re.compile("\ue200[^\ue200\ue201]*\ue201|【[\\d:]+†[^】]*】")
_STATUSES = frozenset(get_args(MessageStatus))
_NOT_TALK = {
    "thoughts": "notes on reasoning",
    "reasoning_recap": "notes on reasoning",
    "user_editable_context": "custom instructions",
    "model_editable_context": "memories",
}


def own_chat(data: Mapping[str, Any]) -> Draft:
    """A chat of our own export. Raises ImportFault."""
    chat_id = _string(data, "id")
    listed = data.get("messages")
    if not chat_id or not isinstance(listed, list):
        raise ImportFault("it lacks its id or its messages.")
    nodes: dict[str, Node] = {}
    for number, message in enumerate(listed, 1):
        if not isinstance(message, dict) or not _string(message, "id"):
            raise ImportFault(f"its message {number} lacks an id.")
        role, status = message.get("role"), message.get("status")
        if role not in ("user", "assistant") or status not in _STATUSES:
            raise ImportFault(f"its message {number} has an unknown role or status.")
        if not isinstance(message.get("text"), str):
            raise ImportFault(f"its message {number} has no text.")
        nodes[message["id"]] = Node(
            parent=_string(message, "parent") or None,
            role=role,
            text=message["text"],
            status="interrupted" if status == "running" else cast(MessageStatus, status),
            error=_string(message, "error") or None,
            created_at=_iso_time(message.get("created_at")),
            completed_at=_iso_time(message.get("completed_at")),
        )
    return _draft(
        data,
        nodes,
        {},
        source="rejoinder",
        identity=chat_id,
        origin_id=chat_id,
        current=_string(data, "active_leaf"),
        begun=_iso_time(data.get("created_at")),
        changed=_iso_time(data.get("updated_at")),
        pinned=data.get("pinned") is True,
        lost=Counter(),
    )


def chatgpt_chat(data: Mapping[str, Any]) -> Draft:
    """A conversation of a ChatGPT export. Raises ImportFault."""
    mapping = data.get("mapping")
    if not isinstance(mapping, dict):
        raise ImportFault("it is no conversation of a ChatGPT export: it has no mapping.")
    lost: Counter[str] = Counter()
    nodes: dict[str, Node] = {}
    order: dict[str, list[str]] = {}
    for name, entry in mapping.items():
        if not isinstance(entry, dict):
            raise ImportFault(f"its node {name[:80]} is no object.")
        message = entry.get("message")
        nodes[name] = _chatgpt_node(entry, message if isinstance(message, dict) else {}, lost)
        children = entry.get("children")
        order[name] = children if isinstance(children, list) else []
    identity = _string(data, "conversation_id") or _string(data, "id")
    begun = _unix_time(data.get("create_time"))
    if not identity:
        identity = f"{data.get('title')}|{data.get('create_time')}|{','.join(sorted(mapping))}"
    return _draft(
        data,
        nodes,
        order,
        source="chatgpt",
        identity=identity,
        origin_id=None,
        current=_string(data, "current_node"),
        begun=begun,
        changed=_unix_time(data.get("update_time")),
        pinned=data.get("is_starred") is True,
        lost=lost,
    )


def _draft(
    data: Mapping[str, Any],
    nodes: Mapping[str, Node],
    order: Mapping[str, list[str]],
    *,
    source: str,
    identity: str,
    origin_id: str | None,
    current: str,
    begun: datetime | None,
    changed: datetime | None,
    pinned: bool,
    lost: Counter[str],
) -> Draft:
    now = datetime.now(UTC)
    times = [node.created_at for node in nodes.values() if node.created_at is not None]
    begun = begun or min(times, default=now)
    changed = max(changed or max(times, default=begun), begun)
    messages, active = draft_tree(nodes, order, current or None, begun, lost)
    for message in messages:
        clean, count = _UNSTORABLE.subn("\ufffd", message.text.replace("\r\n", "\n"))
        message.text = clean
        lost["characters that no text can have"] += count
    title = " ".join(_UNSTORABLE.sub("", _string(data, "title")).split())[:MAX_TITLE_CHARS]
    return Draft(
        key=sha256(f"{source}:{identity}".encode("utf-8", "surrogatepass")).hexdigest(),
        origin_id=origin_id,
        title=title or title_of(messages[0].text),
        pinned=pinned,
        created_at=begun,
        updated_at=changed,
        messages=messages,
        active_leaf=active,
        lost=+lost,
    )


def _chatgpt_node(entry: Mapping[str, Any], message: Mapping[str, Any], lost: Counter[str]) -> Node:
    parent = _string(entry, "parent") or None
    content, metadata = _object(message, "content"), _object(message, "metadata")
    role = _string(_object(message, "author"), "role")
    here: Counter[str] = Counter()
    text = _chatgpt_text(content, here)
    kind = _NOT_TALK.get(_string(content, "content_type"))
    recipient = _string(message, "recipient")
    if role not in ("user", "assistant"):
        other = {"system": "system messages", "tool": "results of tools"}.get(role)
        kind = other or "messages of other roles"
    elif kind is None and recipient not in ("", "all"):
        kind = "calls of tools"
    elif kind is None and metadata.get("is_visually_hidden_from_conversation") is True:
        kind = "hidden messages"
    attached = metadata.get("attachments")
    if isinstance(attached, list) and not here["images"]:
        here["attached files"] += len(attached)
    if kind is not None:
        if text or here or content.get("content_type") not in ("text", None):
            lost[kind] += 1
        lost["images"] += here["images"]
        return Node(parent=parent)
    text, citations = _CITATIONS.subn("", text)
    here["references to sources"] += citations
    lost += here
    left_out = [name for name in ("images", "recordings", "attached files") if here[name]]
    if not text.strip():
        if not left_out:
            return Node(parent=parent)
        text = f"[Not imported: {', '.join(left_out)}]"
    created = _unix_time(message.get("create_time"))
    cut = _string(_object(metadata, "finish_details"), "type") == "interrupted"
    return Node(
        parent=parent,
        role="user" if role == "user" else "assistant",
        text=text,
        status="stopped" if cut or message.get("status") == "in_progress" else "complete",
        created_at=created,
        completed_at=_unix_time(message.get("update_time")) or created,
    )


def _chatgpt_text(content: Mapping[str, Any], lost: Counter[str]) -> str:
    """The words of a message; what else it holds is counted."""
    if content.get("content_type") == "code":
        language = _string(content, "language")
        language = "" if language == "unknown" else re.sub(r"\W", "", language)
        return f"```{language}\n{_string(content, 'text')}\n```"
    parts = content.get("parts")
    if not isinstance(parts, list):
        return _string(content, "text")
    words = []
    for part in parts:
        if isinstance(part, str):
            words.append(part)
        elif isinstance(part, dict):
            kind = _string(part, "content_type")
            if _string(part, "text"):
                words.append(_string(part, "text"))  # a transcript
            elif "image" in kind:
                lost["images"] += 1
            elif "audio" in kind or "video" in kind:
                lost["recordings"] += 1
            else:
                lost["attached files"] += 1
    return "\n".join(word for word in words if word)


def _object(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = data.get(name)
    return value if isinstance(value, dict) else {}


def _string(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    return value if isinstance(value, str) else ""


def _unix_time(value: Any) -> datetime | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return _sane(datetime.fromtimestamp(value, UTC))
    except (ValueError, OverflowError, OSError):
        return None


def _iso_time(value: Any) -> datetime | None:
    try:
        time = datetime.fromisoformat(value)
        return _sane(time if time.tzinfo else time.replace(tzinfo=UTC))
    except (TypeError, ValueError, OverflowError):
        return None


def _sane(time: datetime) -> datetime:
    """Within what a file of chats can know: not before there were any, not after now."""
    return min(max(time.astimezone(UTC), EARLIEST), datetime.now(UTC))
