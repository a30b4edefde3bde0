"""The tables. The schema itself is made by the migrations; a test holds the two together."""

from sessions.models.accounts import AccountLink, ApiKey, Login, User
from sessions.models.answers import PathMark, RenderedAnswer
from sessions.models.api import ApiConversation, ApiResponse, ApiState
from sessions.models.assistants import (
    Assistant,
    AssistantDocument,
    AssistantVersion,
    ChatStorage,
    Prefix,
)
from sessions.models.base import Base
from sessions.models.chats import Chat, ChatToForget, Message, QueuedMessage, SearchEntry
from sessions.models.settings import Setting
from sessions.models.turns import Turn, TurnLatency

__all__ = [
    "AccountLink",
    "ApiConversation",
    "ApiKey",
    "ApiResponse",
    "ApiState",
    "Assistant",
    "AssistantDocument",
    "AssistantVersion",
    "Base",
    "Chat",
    "ChatStorage",
    "ChatToForget",
    "Login",
    "Message",
    "PathMark",
    "Prefix",
    "QueuedMessage",
    "RenderedAnswer",
    "SearchEntry",
    "Setting",
    "Turn",
    "TurnLatency",
    "User",
]
