"""Text to token ids and back for chats: control tokens come from the template only."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from engine.errors import ModelError
from engine.model.chat_template import ChatTemplate
from engine.model.token_bytes import missing_bytes, token_bytes, without_added_tokens


class IncrementalDecoder:
    """Decodes one answer token by token; owned by its request.

    The texts returned, joined, are what `ChatTokenizer.decode` gives for all ids. Each push costs
    the bytes of its token, however long the answer is.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that became certain: bytes of an unfinished character are held back."""
        return self._decoder.decode(_bytes_of(self._pieces, token_id))

    def flush(self) -> str:
        """What was held back: a replacement character if the bytes end inside one."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class ChatTokenizer:
    """A model's tokenizer and chat template. Immutable; any thread may call it.

    Texts are encoded by a copy of the tokenizer that knows no control token, and are never trimmed.
    Ids of a chat are those of its pieces one after the other, so no merge crosses a text's edge.
    """

    def __init__(self, model_dir: Path) -> None:
        """Read `tokenizer.json`, `tokenizer_config.json` and the chat template.

        Raises ModelError when something is missing, damaged or unsupported.
        """
        data = _read_json(model_dir / "tokenizer.json")
        config = _read_json(model_dir / "tokenizer_config.json")
        special_tokens = _special_tokens(config)
        template = _template_source(model_dir, config)
        self.digest: str = _digest(data, template, special_tokens)

        try:
            self._full = Tokenizer.from_str(_json(data))
            self._plain = Tokenizer.from_str(_json(without_added_tokens(data)))
        except Exception as error:  # tokenizers raises nothing narrower
            raise ModelError(f"{model_dir / 'tokenizer.json'} cannot be read: {error}") from error
        added = self._full.get_added_tokens_decoder()
        special_ids = {token_id for token_id, token in added.items() if token.special}
        # Some vocabularies add runs of spaces as tokens; those are ordinary text.
        added = {i: token for i, token in added.items() if token.special or token.content.strip()}
        self._control_ids = frozenset(added)
        self._pieces_bytes = token_bytes(data, self._full.get_vocab(), special_ids)
        self._missing_bytes = missing_bytes(self._pieces_bytes)
        longest_first = sorted((token.content for token in added.values()), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

        self._bos_id = self._full.token_to_id(special_tokens.get("bos_token", ""))
        self._adds_bos = self._bos_id is not None and self._full.encode("").ids[:1] == [
            self._bos_id
        ]
        self.template = ChatTemplate(template, special_tokens)
        self.template_source = template
        self.pieces = self.template.pieces()
        self.eos_token_ids: frozenset[int] = self._end_tokens(model_dir, special_tokens)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return len(self._pieces_bytes)

    def prefix_ids(self, system_prompt: str) -> list[int]:
        """The chat up to the first user message, begun by one BOS if the model has it.

        An empty system prompt is none: the template's own default then applies.
        """
        pieces = self.pieces
        if system_prompt:
            ids = self._encode_around(
                pieces.system_open, system_prompt, pieces.system_close, at_start=True
            )
        else:
            ids = self.encode_piece(pieces.no_system, at_start=True)
        return self.with_one_bos(ids)

    def with_one_bos(self, ids: list[int]) -> list[int]:
        """The ids of a sequence's start, begun by one BOS if the model has it."""
        if self._bos_id is None:
            return ids
        content = 0
        while content < len(ids) and ids[content] == self._bos_id:
            content += 1
        if self._adds_bos or content:
            return [self._bos_id, *ids[content:]]
        return ids

    def user_ids(self, text: str, *, first: bool) -> list[int]:
        """A user's message with all that stands around it, up to where the answer begins.

        Other than the `first`, it also holds the end of the answer before it.
        """
        opening = self.pieces.user_open if first else self.pieces.next_user_open
        return self._encode_around(opening, text, self.pieces.user_close, at_start=False)

    def spells_control_token(self, text: str) -> bool:
        """Whether the text, if it were taken for the template's own, would hold control tokens."""
        return self._control.search(text) is not None

    def encode_text(self, text: str) -> list[int]:
        """The text as ordinary tokens, whatever control tokens it spells.

        `decode` gives the text back, but for characters that the vocabulary cannot write at all
        (some lack the first byte of unassigned ones): those become U+FFFD. Raises ValueError when
        the text is not valid Unicode (a lone surrogate).
        """
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise ValueError("the text is not valid Unicode: it holds a lone surrogate") from error
        missing = self._missing_bytes
        if missing and len(data.translate(None, missing)) < len(data):
            text = "".join(
                "\ufffd"
                if character.encode().translate(None, missing) != character.encode()
                else character
                for character in text
            )
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return ids
        return self._encode_apart(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids. Special tokens have none; broken UTF-8 is replaced."""
        pieces = self._pieces_bytes
        return b"".join(_bytes_of(pieces, token_id) for token_id in ids).decode("utf-8", "replace")

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; none for special tokens."""
        return _bytes_of(self._pieces_bytes, token_id)

    def name_of(self, token_id: int) -> str:
        """A token for people: its text, the name of a special one."""
        data = self.bytes_of(token_id)
        return data.decode("utf-8", "replace") or self._full.id_to_token(token_id) or ""

    def incremental(self) -> IncrementalDecoder:
        """A decoder for one answer."""
        return IncrementalDecoder(self._pieces_bytes)

    def _encode_around(self, opening: str, text: str, closing: str, *, at_start: bool) -> list[int]:
        """Ids of opening, text and closing; spaces ending the opening belong to the first word."""
        head = opening.rstrip(" ")
        text = opening[len(head) :] + text
        return [
            *self.encode_piece(head, at_start=at_start),
            *self.encode_text(text),
            *self.encode_piece(closing, at_start=False),
        ]

    def encode_piece(self, piece: str, *, at_start: bool) -> list[int]:
        """Ids of what the template wrote; only a sequence's start gets a tokenizer's own prefix."""
        control = self._control.search(piece)
        head = piece if control is None else piece[: control.start()]
        if at_start or not head:
            ids: list[int] = self._full.encode(piece, add_special_tokens=False).ids
            return ids
        rest: list[int] = self._full.encode(piece[len(head) :], add_special_tokens=False).ids
        return self.encode_text(head) + rest

    def _encode_apart(self, text: str) -> list[int]:
        """Encode a text that gave a control token in parts that cannot."""
        ids: list[int] = []
        start = 0
        cuts = [match.start() + 1 for match in self._control.finditer(text)]
        for end in [*cuts, len(text)]:
            ids += self._plain.encode(text[start:end], add_special_tokens=False).ids
            start = end
        if not self._control_ids.isdisjoint(ids):
            ids = [
                token_id
                for character in text
                for token_id in self._plain.encode(character, add_special_tokens=False).ids
            ]
        if not self._control_ids.isdisjoint(ids):
            raise ValueError("the text cannot be written without the model's control tokens")
        return ids

    def _end_tokens(self, model_dir: Path, special_tokens: Mapping[str, str]) -> frozenset[int]:
        """Ids that end an answer: the configured ones, and what the template ends it with."""
        found: set[int | None] = {self._full.token_to_id(special_tokens.get("eos_token", ""))}
        for name in ("generation_config.json", "config.json"):
            if (model_dir / name).exists():
                configured = _read_json(model_dir / name).get("eos_token_id")
                found.update(configured if isinstance(configured, list) else [configured])
        end_of_turn = self._control.match(self.pieces.next_user_open.lstrip())
        if end_of_turn is not None:
            found.add(self._full.token_to_id(end_of_turn.group()))
        ids = frozenset(token_id for token_id in found if token_id is not None)
        if not ids:
            raise ModelError(f"{model_dir} names no token that ends an answer")
        return ids


def _bytes_of(pieces: Sequence[bytes], token_id: int) -> bytes:
    """Ids over the vocabulary's size (padding of the embedding) have no text."""
    return pieces[token_id] if token_id < len(pieces) else b""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ModelError(f"{path} holds no JSON object")
    return data


def _json(data: Mapping[str, Any]) -> str:
    return msgspec.json.encode(data).decode()


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of bos_token, eos_token and the like; each is a string or a record with `content`."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        if name.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens


def _template_source(model_dir: Path, config: Mapping[str, Any]) -> str:
    """The chat template, from where transformers would take it. Raises ModelError."""
    file = model_dir / "chat_template.jinja"
    try:
        if file.exists():
            return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise ModelError(
            f"{model_dir} has no chat template: take an instruction-tuned model, or add a "
            "chat_template.jinja"
        )
    return template


def _digest(data: Mapping[str, Any], template: str, special_tokens: Mapping[str, str]) -> str:
    everything = json.dumps([data, template, special_tokens], sort_keys=True)
    return hashlib.sha256(everything.encode()).hexdigest()
