"""A way on from a chat that is full: a new one that begins with the last exchanges."""

from __future__ import annotations

from collections.abc import Sequence

from app.message_text import MAX_TITLE_CHARS
from app.prompts import Prompts
from sessions.records import Carried, CarriedMessage, Chat, Message
from sessions.repository import Repository

SHARE = 0.5  # of the context that the new chat may have used at its start
SUFFIX = " (continued)"


async def carry_over(repository: Repository, prompts: Prompts, chat: Chat) -> Chat:
    """Make the new chat, with the assistant's current version; its owner's, like the old one.

    As many exchanges (a question and its answer) are taken as fill half of the context, the last
    ones. Texts are exact; questions are encoded anew, and so are answers of another tokenizer.
    """
    exchanges = _exchanges(await repository.path(chat.id))
    old = await repository.prefix_by_id(chat.prefix_id)
    prefix = await prompts.latest_prefix(chat)
    same_tokenizer = old.tokenizer_digest == prefix.tokenizer_digest
    room = int(prompts.context_limit * SHARE) - len(prefix.token_ids)
    taken: list[CarriedMessage] = []
    for question, answer in reversed(exchanges):
        answer_ids = answer.token_ids
        if not same_tokenizer:
            answer_ids = await prompts.answer_ids(answer.text)
        # Encoded as if another one stood before it, which takes as many tokens or more.
        question_ids = await prompts.user_ids(question.text, first=False)
        room -= len(question_ids) + len(answer_ids)
        if room < 0:
            break
        taken[:0] = [
            CarriedMessage(role="user", text=question.text, token_ids=question_ids),
            CarriedMessage(role="assistant", text=answer.text, token_ids=answer_ids),
        ]
    if taken:
        first_ids = await prompts.user_ids(taken[0].text, first=True)
        taken[0] = CarriedMessage(role="user", text=taken[0].text, token_ids=first_ids)
    title = chat.title.removesuffix(SUFFIX)[: MAX_TITLE_CHARS - len(SUFFIX)] + SUFFIX
    carried = Carried(chat_id=chat.id, exchanges=len(taken) // 2, of=len(exchanges))
    new_id = await repository.carry_over(chat.user_id, prefix.id, title, taken, carried)
    made = await repository.chat(chat.user_id, new_id)
    assert made is not None, "it was made just now"
    return made


def _exchanges(path: Sequence[Message]) -> list[tuple[Message, Message]]:
    """Questions with their answers, but for those that were answered by nothing."""
    pairs = zip(path[::2], path[1::2], strict=False)
    return [(question, answer) for question, answer in pairs if answer.token_ids]
