"""The bytes that each token of a vocabulary stands for, and a vocabulary without control tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from engine.errors import ModelError


def token_bytes(
    data: Mapping[str, Any], vocab: Mapping[str, int], special_ids: Collection[int]
) -> list[bytes]:
    """Bytes by token id; empty for special tokens and for ids that no token has.

    `data` is the content of tokenizer.json, `vocab` all its tokens. Raises ModelError when the
    tokenizer is neither byte-level BPE nor BPE with byte fallback.
    """
    decoders = _steps(data.get("decoder"), "decoders")
    kinds = {step["type"] for step in decoders}
    if "ByteLevel" in kinds:
        to_bytes = _byte_level
    elif kinds & {"ByteFallback", "Metaspace"}:
        to_bytes = _byte_fallback
    else:
        raise ModelError(
            "the model's tokenizer is not supported: byte-level BPE and BPE with byte fallback are"
        )
    added = {token["content"] for token in data.get("added_tokens") or ()}
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        if token_id not in special_ids:
            table[token_id] = token.encode() if token in added else to_bytes(token)
    return table


def missing_bytes(table: Sequence[bytes]) -> bytes:
    """The bytes that no token stands for alone, so that some texts cannot be written."""
    present = {piece[0] for piece in table if len(piece) == 1}
    return bytes(byte for byte in range(256) if byte not in present)


def without_added_tokens(data: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer.json for text inside a sequence: no control token, no space put before it."""
    plain = dict(data)
    plain["added_tokens"] = []
    plain["post_processor"] = None
    plain["normalizer"] = _in_sequence(
        [step for step in _steps(data.get("normalizer"), "normalizers") if not _prepends(step)],
        "normalizers",
    )
    plain["pre_tokenizer"] = _in_sequence(
        [_no_prefix(step) for step in _steps(data.get("pre_tokenizer"), "pretokenizers")],
        "pretokenizers",
    )
    return plain


def _steps(component: Mapping[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """A component as a flat list: a sequence's members, or itself."""
    if component is None:
        return []
    if component["type"] == "Sequence":
        return [step for member in component[key] for step in _steps(member, key)]
    return [dict(component)]


def _in_sequence(steps: list[dict[str, Any]], key: str) -> dict[str, Any] | None:
    return {"type": "Sequence", key: steps} if steps else None


def _prepends(step: Mapping[str, Any]) -> bool:
    return bool(step["type"] == "Prepend")


def _no_prefix(step: dict[str, Any]) -> dict[str, Any]:
    if step["type"] == "Metaspace":
        return {**step, "prepend_scheme": "never"}
    if step["type"] == "ByteLevel":
        return {**step, "add_prefix_space": False}
    return step


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    characters.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return characters


_BYTES = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:  # not written in the alphabet, so it is text
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
