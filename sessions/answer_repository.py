"""The part of the repository that is about what is derived of messages."""

from __future__ import annotations

from collections.abc import Sequence

from sessions.answer_records import MarkedChat, Rendered, TreeMessage
from sessions.database import Database
from sessions.queries import answers, path_marks


class AnswerRepository:
    """Base of `Repository`, which sets the attribute."""

    _database: Database

    async def rendered_answers(self, message_ids: Sequence[str]) -> list[Rendered]:
        """The HTML that is kept of these answers, by whatever renderer."""
        if not message_ids:
            return []
        async with self._database.read() as db:
            return await answers.rendered(db, message_ids)

    async def keep_rendered(self, rendered: Sequence[Rendered]) -> None:
        """Keep the HTML of answers that are still there, in place of what was kept before."""
        await self._database.write(lambda db: answers.keep_rendered(db, rendered))

    async def chats_begun_with(self, user_id: str, digests: Sequence[bytes]) -> list[MarkedChat]:
        """A few of the user's chats, the latest first, that have the first of these found.

        Chats have the digests of `path_digests` as far as turns have ended in them.
        """
        async with self._database.read() as db:
            return await path_marks.chats_with(db, user_id, digests)

    async def message_tree(self, chat_id: str) -> list[TreeMessage]:
        """All messages of a chat, in any order; empty when there is no such."""
        async with self._database.read() as db:
            return await path_marks.tree(db, chat_id)
