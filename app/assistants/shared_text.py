"""The text that all chats of an assistant's version begin with.

It is the system prompt, then, if there are any, the documents in their order:

    SYSTEM PROMPT

    # Documents

    ## NAME OF THE FIRST

    ITS TEXT

    ## NAME OF THE SECOND

    ITS TEXT

Prompt and texts are as they were written. All of it goes into the model's own template as one
system message, encoded as text: control tokens that it spells stay text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from engine.model.tokenizer import ChatTokenizer
from sessions.assistant_records import AssistantDocument
from sessions.records import AssistantVersion, Prefix
from sessions.repository import Repository

HEADING = "# Documents"


def shared_text(system_prompt: str, documents: Sequence[AssistantDocument]) -> str:
    """The system message; "" when there is neither prompt nor document."""
    if not documents:
        return system_prompt
    parts = [system_prompt] if system_prompt else []
    parts.append(HEADING)
    for document in documents:
        parts += [f"## {document.name}", document.text]
    return "\n\n".join(parts)


class AssistantPrefixes:
    """Makes the token ids that chats share; stateless but for what it was given."""

    def __init__(self, repository: Repository, tokenizer: ChatTokenizer) -> None:
        self._repository = repository
        self._tokenizer = tokenizer

    async def ids(self, system_prompt: str, documents: Sequence[AssistantDocument]) -> list[int]:
        """The chat up to its first message, with the model's template around the shared text."""
        text = shared_text(system_prompt, documents)
        return await asyncio.to_thread(self._tokenizer.prefix_ids, text)

    async def current(self, assistant_id: str) -> Prefix:
        """Of an assistant's current version. Raises NotFound."""
        return await self.of(await self._repository.assistant_version(assistant_id))

    async def of(self, version: AssistantVersion) -> Prefix:
        """Made when the version's first chat begins, and the same ids from then on."""
        documents = await self._repository.version_documents(version.id)
        ids = await self.ids(version.system_prompt, documents)
        return await self._repository.prefix(version.id, self._tokenizer.digest, ids)
