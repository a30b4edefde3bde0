"""A chat put on the latest version of its assistant: other tokens before its messages."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from app.faults import NoSuchPage
from app.prompts import Prompts
from engine.client import Engine
from engine.errors import ContextOverflow, EngineError
from sessions.records import Chat, Message
from sessions.repository import Repository

logger = logging.getLogger(__name__)


async def move_to_latest(
    repository: Repository, prompts: Prompts, engine: Engine, chat: Chat, path: Sequence[Message]
) -> bool:
    """Put the new version's tokens before the messages of a chat in which nothing runs.

    The messages' own ids stay as they are. All K/V of the chat is of the old prefix: what is
    checkpointed is not found by the new tokens' digest and the next turn computes everything, so
    the engine is told to let go of the old. False when the chat is on that version already.
    Raises WrongModel, ContextOverflow, NoSuchPage, TurnRunning.
    """
    await prompts.prefix_of(chat)  # its messages are of this model's tokenizer
    prefix = await prompts.latest_prefix(chat)
    if prefix.id == chat.prefix_id:
        return False
    num_tokens = len(prefix.token_ids) + sum(len(message.token_ids) for message in path)
    if num_tokens >= prompts.context_limit:
        raise ContextOverflow(num_tokens, prompts.context_limit)
    if not await repository.move_chat(chat.user_id, chat.id, prefix.id):
        raise NoSuchPage
    try:
        await engine.forget([chat.id])
    except EngineError as error:
        # Stale checkpoints are of no use to anybody and go when space is needed.
        logger.warning("the old state of chat %s stays for now: %s", chat.id, error)
    return True
