"""The part of the repository that is about the API: keys, responses, conversations, states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from sessions.clock import Clock
from sessions.database import Database
from sessions.queries import api_conversations, api_keys, api_responses, api_states
from sessions.records import (
    ApiConversation,
    ApiItem,
    ApiKey,
    ApiResponse,
    ApiState,
    Prefix,
    Turn,
)


class ApiRepository:
    """Base of `Repository`, which sets the attributes."""

    _database: Database
    _clock: Clock

    # Keys

    async def create_api_key(
        self,
        name: str,
        key_hash: str,
        hint: str,
        *,
        user_id: str | None = None,
        max_requests: int | None = None,
    ) -> ApiKey:
        """A key for this user, by default for a new one. Raises NotFound (user)."""
        now = self._clock.now()
        return await self._database.write(
            lambda db: api_keys.create(db, user_id, name, key_hash, hint, max_requests, now)
        )

    async def api_key(self, key_hash: str) -> ApiKey | None:
        """The key with this hash, unless it was revoked or its user disabled."""
        async with self._database.read() as db:
            return await api_keys.valid(db, key_hash)

    async def api_keys(self) -> list[ApiKey]:
        """All keys, revoked ones included, oldest first."""
        async with self._database.read() as db:
            return await api_keys.all_keys(db)

    async def valid_api_keys(self, user_id: str) -> list[ApiKey]:
        """A user's keys, oldest first."""
        async with self._database.read() as db:
            return await api_keys.of_user(db, user_id)

    async def revoke_api_key(self, key_id: str, *, user_id: str | None = None) -> bool:
        """False when there is no such key that is valid, or it is not that user's."""
        now = self._clock.now()
        return await self._database.write(
            lambda db: api_keys.revoke(db, key_id, now, user_id=user_id)
        )

    # States of stateless calls

    async def api_states(self) -> list[ApiState]:
        async with self._database.read() as db:
            return await api_states.all_states(db)

    async def keep_api_state(self, state: ApiState, *, replaces: str | None) -> None:
        """Store a state, in place of the one that it went on from."""
        await self._database.write(lambda db: api_states.keep(db, state, replaces))

    async def drop_api_states_before(self, used_before: float) -> None:
        """Drop those that were last used before then (seconds since the epoch)."""
        async with self._database.read() as db:
            old = await api_states.used_before(db, used_before)
        await self.drop_api_states(old)

    async def drop_api_states(self, state_ids: Sequence[str]) -> None:
        """Delete states; chats that are left with none are noted in `chats_to_forget`."""
        if state_ids:
            await self._database.write(lambda db: api_states.drop(db, state_ids), truncate_wal=True)

    # Responses

    async def drop_unused_api_prefixes(self) -> None:
        """Delete the API's system prompts that no chat has had for a day."""
        before = self._clock.now() - timedelta(days=1)
        async with self._database.read() as db:
            unused = await api_responses.unused_prefixes(db, before)
        if unused:
            await self._database.write(
                lambda db: api_responses.drop_prefixes(db, unused), truncate_wal=True
            )

    async def prefix_of_chat(self, chat_id: str) -> Prefix:
        """Raises NotFound."""
        async with self._database.read() as db:
            return await api_responses.prefix_of_chat(db, chat_id)

    async def api_prefix(
        self,
        user_id: str,
        key: str,
        system_text: str,
        tokenizer_digest: str,
        token_ids: Sequence[int],
    ) -> Prefix:
        """The prefix of a user's own system prompt; made from `token_ids` the first time.

        `key` names it among the user's.
        """
        now = self._clock.now()
        return await self._database.write(
            lambda db: api_responses.ensure_prefix(
                db, user_id, key, system_text, tokenizer_digest, token_ids, now
            )
        )

    async def start_response(
        self,
        *,
        user_id: str,
        response_id: str,
        prefix_id: str,
        chat_id: str | None,
        parent_id: str | None,
        title: str,
        items: Sequence[ApiItem],
        num_inputs: int,
        sampling: Mapping[str, Any],
        body: Mapping[str, Any],
        conversation: ApiConversation | None = None,
    ) -> Turn:
        """Messages and a running answer after `parent_id`, or in a new chat, in one transaction.

        A conversation has this chat from then on, and no items that wait. Raises TurnRunning,
        also when the conversation was changed meanwhile.
        """
        now = self._clock.now()
        return await self._database.write(
            lambda db: api_responses.start(
                db,
                user_id=user_id,
                response_id=response_id,
                prefix_id=prefix_id,
                chat_id=chat_id,
                parent_id=parent_id,
                title=title,
                items=items,
                num_inputs=num_inputs,
                sampling=sampling,
                body=body,
                conversation=conversation,
                now=now,
            )
        )

    async def api_response(self, user_id: str, response_id: str) -> ApiResponse | None:
        """None when there is no such response or it is another user's."""
        async with self._database.read() as db:
            return await api_responses.response(db, user_id, response_id)

    async def set_response_body(self, response_id: str, body: Mapping[str, Any]) -> None:
        await self._database.write(lambda db: api_responses.set_body(db, response_id, body))

    async def delete_response(self, user_id: str, response_id: str) -> bool:
        """False when there is no such response of this user."""
        now = self._clock.now()
        return await self._database.write(
            lambda db: api_responses.delete_response(db, user_id, response_id, now)
        )

    # Conversations

    async def create_conversation(
        self, user_id: str, items: Sequence[ApiItem], labels: Mapping[str, str]
    ) -> ApiConversation:
        now = self._clock.now()
        return await self._database.write(
            lambda db: api_conversations.create_conversation(db, user_id, items, labels, now)
        )

    async def conversation(self, user_id: str, conversation_id: str) -> ApiConversation | None:
        """None when there is no such conversation or it is another user's."""
        async with self._database.read() as db:
            return await api_conversations.conversation(db, user_id, conversation_id)

    async def change_conversation(
        self,
        known: ApiConversation,
        *,
        items: Sequence[ApiItem],
        labels: Mapping[str, str] | None = None,
    ) -> bool:
        """New items that wait, new labels; False when it was changed meanwhile."""
        return await self._database.write(
            lambda db: api_conversations.change_conversation(
                db,
                known,
                chat_id=known.chat_id,
                leaf_id=known.leaf_id,
                items=items,
                labels=labels,
            )
        )

    async def leave_chat(self, known: ApiConversation, items: Sequence[ApiItem]) -> bool:
        """Let the conversation be these items only, which its next answer begins a chat with.

        False when it was changed meanwhile. Raises TurnRunning.
        """
        now = self._clock.now()
        return await self._database.write(
            lambda db: api_conversations.leave_chat(db, known, items, now)
        )

    async def delete_conversation(self, user_id: str, conversation_id: str) -> bool:
        """False when there is no such conversation of this user."""
        now = self._clock.now()
        return await self._database.write(
            lambda db: api_conversations.delete_conversation(db, user_id, conversation_id, now)
        )
