"""Stateless calls that go on from a chat of the same user, wherever that was talked to."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from app.api.states import Found, common_length
from app.turn_records import history_of, was_made_here
from sessions.answer_records import MarkedChat, TreeMessage
from sessions.path_digests import digests
from sessions.repository import Repository


class KeptChats:
    """Finds the chat that a prompt goes on from by the longest agreeing ids. Event loop only.

    Only the ids of a few chats are read: those that begin with the same tokens as far as any
    does, by digests that are kept of each chat's first 64, 128, 256 and so on.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    async def find(
        self, user_id: str, prefix_ids: Sequence[int], ids: Sequence[int]
    ) -> Found | None:
        """None when no chat of this user has begun with a page of these tokens."""
        known = digests(user_id, prefix_ids, ids)
        longest_first = sorted(known, key=known.__getitem__, reverse=True)
        chats = await self._repository.chats_begun_with(user_id, longest_first)
        found = [await self._agreeing(chat, ids) for chat in chats]
        return max(found, key=lambda one: one.agreed, default=None)  # the latest of equals

    async def _agreeing(self, chat: MarkedChat, ids: Sequence[int]) -> Found:
        messages = await self._repository.message_tree(chat.chat_id)
        path, agreed = longest_path(messages, ids)
        # A question has been read whole once it has an answer.
        below = (one for one in messages if path and one.parent_id == path[-1].id)
        answered = [one for one in below if was_made_here(one) and one.token_ids]
        _, computed = history_of([*path, *answered[:1]])
        scope = chat.assistant_id if chat.origin == "browser" else ""
        return Found(chat.chat_id, agreed, min(agreed, computed), borrowed=True, scope=scope)


def longest_path(
    messages: Sequence[TreeMessage], ids: Sequence[int]
) -> tuple[list[TreeMessage], int]:
    """The path from the root that has the most tokens in common with `ids`, and how many.

    Its last message may agree in part, or not at all.
    """
    wanted = array("i", ids)
    by_id = {one.id: one for one in messages}
    children: dict[str | None, list[TreeMessage]] = {}
    for one in messages:
        children.setdefault(one.parent_id, []).append(one)
    best: TreeMessage | None = None
    most = -1
    left = [(one, 0) for one in children.get(None, [])]  # with where their tokens begin
    while left:
        one, start = left.pop()
        own = array("i", one.token_ids)
        common = common_length(own, wanted[start : start + len(own)])
        if start + common >= most:
            best, most = one, start + common
        if common == len(own):  # else what is after it differs
            left += [(child, start + common) for child in children.get(one.id, [])]
    path: list[TreeMessage] = []
    above = best
    while above is not None:
        path.insert(0, above)
        above = by_id.get(above.parent_id or "")
    return path, max(0, most)
