"""What the repository hands out: plain frozen records, never objects of the ORM.

Ids are 32 hex digits made by the server, times are aware and in UTC, token ids are those that the
model saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

Role = Literal["user", "assistant"]
MessageStatus = Literal["complete", "running", "stopped", "interrupted", "failed"]
EndStatus = Literal["complete", "stopped", "interrupted", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A guest, known by a browser's login only, or an account with a name."""

    id: str
    created_at: datetime
    name: str | None = None
    is_operator: bool = False
    disabled_at: datetime | None = None

    @property
    def is_guest(self) -> bool:
        return self.name is None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key of the API as far as it can be known again: the key itself is stored hashed."""

    id: str
    user_id: str
    name: str
    hint: str  # how the key ends
    max_requests: int | None  # at once; None: as many as its user may have
    created_at: datetime
    revoked_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiState:
    """The token ids of a stateless call; `computed` leading ones have had K/V.

    Times here are seconds since the epoch.
    """

    id: str
    user_id: str
    chat_id: str
    prefix_ids: list[int]
    token_ids: list[int]
    prompt_tokens: int
    computed: int
    used_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiItem:
    """A message of the API; `token_ids` are those that it adds to its chat, maybe none."""

    id: str
    role: str
    text: str
    token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiConversation:
    id: str
    user_id: str
    chat_id: str | None
    leaf_id: str | None  # its last answer in that chat
    items: list[ApiItem]  # those that no answer has followed yet
    labels: dict[str, str]
    version: int
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiResponse:
    id: str
    user_id: str
    chat_id: str
    message_id: str
    num_inputs: int
    body: dict[str, Any]
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantSeed:
    """A built-in assistant as shipped; `slug` names it for ever, the rest may change."""

    slug: str
    name: str
    description: str
    greeting: str
    system_prompt: str
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assistant:
    """An assistant at its current version; `sampling` holds the defaults that it sets."""

    id: str
    slug: str | None
    name: str
    description: str
    greeting: str
    published: bool
    sampling: Mapping[str, Any]
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantVersion:
    id: str
    assistant_id: str
    number: int
    system_prompt: str
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """The rendered system prompt of one assistant version under one tokenizer, frozen."""

    id: str
    assistant_version_id: str
    tokenizer_digest: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What a chat took along from the one that it goes on from, which may be gone by now."""

    chat_id: str
    exchanges: int  # questions with their answers, the last ones
    of: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCursor:
    """A place in a user's list of chats: pinned ones first, then the latest."""

    pinned: bool
    updated_at: datetime
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSummary:
    id: str
    title: str
    assistant_name: str
    running: bool
    pinned: bool
    created_at: datetime
    updated_at: datetime

    @property
    def cursor(self) -> ChatCursor:
        return ChatCursor(pinned=self.pinned, updated_at=self.updated_at, id=self.id)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedChat:
    """A chat that was deleted and can still be brought back."""

    id: str
    title: str
    deleted_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    id: str
    user_id: str
    prefix_id: str
    title: str
    active_leaf_id: str | None
    pinned: bool
    assistant_id: str
    assistant_name: str
    assistant_version: int  # the number that the chat began with
    latest_version: int  # the assistant's current one
    created_at: datetime
    updated_at: datetime
    carried: Carried | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One node of a chat's tree; text and ids are exact.

    `finish_reason` and `error` are None for user messages and for answers without one: a complete
    answer without a reason was not made in this chat (it was carried over or imported).
    `group_id` is shared by the answers that were asked for together, None for one alone.
    """

    id: str
    chat_id: str
    parent_id: str | None
    role: Role
    text: str
    token_ids: list[int]
    status: MessageStatus
    finish_reason: str | None
    error: str | None
    created_at: datetime
    completed_at: datetime | None
    group_id: str | None = None
    candidate: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedMessage:
    """A message that waits for the end of an answer; with a `problem`, for its user."""

    chat_id: str
    text: str
    problem: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedMessage:
    """A message for a new chat, under the tokenizer of its prefix."""

    role: Role
    text: str
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A user's message and the answer that is, or was, generated for it."""

    id: str
    chat_id: str
    user_message_id: str
    message_id: str
    running: bool
    sampling: Mapping[str, Any]
    created_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What is certain of a running answer so far."""

    message_id: str
    text: str
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Measurements of one turn: the engine's statistics under their own names, and the server's.

    Milliseconds, tokens and bytes as named; None where nothing was measured, never 0 for that.
    """

    queue_ms: float
    restore_ms: float
    restore_io_ms: float
    restore_compute_ms: float
    restore_method: str
    restore_bytes: int
    prefill_ms: float
    ttft_ms: float | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    total_ms: float
    tokens_in: int
    tokens_out: int
    prefix_tokens: int
    resident_tokens: int
    restored_tokens: int
    recomputed_tokens: int
    new_tokens: int
    batch_size: float
    prefix_restored_tokens: int = 0
    prefix_computed_tokens: int = 0
    preemptions: int = 0
    restore_plan: str = ""
    restore_predicted_ms: float | None = None
    restored_from_memory: int = 0  # of restored_tokens: from host memory, not from disk
    # When in the turn what was restored: [kind, start_ms, end_ms, tokens, layers] each.
    restore_spans: Sequence[Sequence[Any]] = ()
    server_ttft_ms: float | None = None  # server's receipt to first token put on the stream


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLatency:
    turn_id: str
    chat_id: str
    message_id: str
    created_at: datetime
    latency: Latency
