"""Token ids of real text: the system prompts that the program ships."""

from __future__ import annotations

from app.assistants.loader import builtin_assistants
from engine.model.tokenizer import ChatTokenizer


def text_ids(tokenizer: ChatTokenizer, count: int, *, skip: int = 0) -> list[int]:
    """`count` ids of the shipped prompts, read round and round from id `skip` on."""
    text = "\n\n".join(assistant.system_prompt for assistant in builtin_assistants())
    ids = tokenizer.encode_text(text)
    return [ids[(skip + i) % len(ids)] for i in range(count)]


def default_prefix_ids(tokenizer: ChatTokenizer) -> list[int]:
    """The rendered system prompt of the default assistant."""
    return tokenizer.prefix_ids(builtin_assistants()[0].system_prompt)
