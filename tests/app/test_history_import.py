"""Imports: files as they come, foreign trees as ours, and what cannot be taken along."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.history import import_file, json_cutter
from app.history.import_file import Entry, ImportFile, ImportRefused
from app.history.import_formats import chatgpt_chat, own_chat
from app.history.import_tree import Draft, ImportFault

NOW = 1_700_000_000.0


def node(
    parent: str | None,
    role: str = "",
    text: str = "",
    *,
    children: list[str] | None = None,
    at: float | None = NOW,
    **message: Any,
) -> dict[str, Any]:
    """A node of a ChatGPT export's mapping."""
    content = message.pop("content", {"content_type": "text", "parts": [text]})
    body = {"author": {"role": role}, "create_time": at, "content": content, **message}
    return {"parent": parent, "children": children or [], "message": body if role else None}


def conversation(mapping: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "conversation_id": "c-1",
        "title": "A title",
        "create_time": NOW,
        "update_time": NOW + 100,
        "mapping": mapping,
        **fields,
    }


def shape(draft: Draft) -> list[tuple[int | None, str, str]]:
    return [(one.parent, one.role, one.text) for one in draft.messages]


TALK = {
    "root": node(None, children=["s"]),
    "s": node("root", "system", "", children=["q1", "q1b"]),
    "q1": node("s", "user", "first question", children=["a1", "a1b"]),
    "a1": node("q1", "assistant", "first answer", children=["q2"]),
    "a1b": node("q1", "assistant", "other answer"),
    "q2": node("a1", "user", "second question", children=["a2"]),
    "a2": node("q2", "assistant", "second answer"),
    "q1b": node("s", "user", "edited question", children=["a3"]),
    "a3": node("q1b", "assistant", "its answer"),
}


def test_a_tree_keeps_its_branches_and_its_place() -> None:
    draft = chatgpt_chat(conversation(TALK, current_node="a2"))
    assert shape(draft) == [
        (None, "user", "first question"),
        (0, "assistant", "first answer"),
        (1, "user", "second question"),
        (2, "assistant", "second answer"),
        (0, "assistant", "other answer"),
        (None, "user", "edited question"),
        (5, "assistant", "its answer"),
    ]
    assert draft.active_leaf == 3
    assert draft.lost == Counter()
    assert (draft.title, draft.pinned, draft.origin_id) == ("A title", False, None)
    assert draft.created_at == datetime.fromtimestamp(NOW, UTC)
    assert draft.updated_at == datetime.fromtimestamp(NOW + 100, UTC)
    for message in draft.messages:
        if message.parent is not None:
            before = draft.messages[message.parent]
            assert message.created_at >= before.created_at
            assert message.role == "assistant" or message.created_at > before.created_at
    siblings = [draft.messages[1], draft.messages[4]]
    assert siblings[0].created_at < siblings[1].created_at, "the order of branches is that of times"
    for current, leaf in (("a1", 3), ("q1b", 6), ("a1b", 4), ("s", 6), (None, 6), ("no", 6)):
        assert chatgpt_chat(conversation(TALK, current_node=current)).active_leaf == leaf


def test_what_is_no_talk_is_passed_over_and_counted() -> None:
    image = {"content_type": "image_asset_pointer", "asset_pointer": "x"}
    mapping = {
        "root": node(None, children=["c"]),
        "c": node("root", "system", "secret rules", children=["i"]),
        "i": node(
            "c",
            "user",
            children=["q"],
            content={"content_type": "user_editable_context", "user_profile": "x"},
        ),
        "q": node(
            "i",
            "user",
            children=["t"],
            content={"content_type": "multimodal_text", "parts": [image, "what is this?"]},
        ),
        "t": node(
            "q",
            "assistant",
            children=["call"],
            content={"content_type": "thoughts", "thoughts": []},
        ),
        "call": node(
            "t",
            "assistant",
            children=["tool"],
            recipient="python",
            content={"content_type": "code", "language": "python", "text": "1+1"},
        ),
        "tool": node(
            "call",
            "tool",
            children=["a"],
            content={"content_type": "execution_output", "text": "2"},
        ),
        "a": node(
            "tool", "assistant", "a cat\ue200cite\ue202turn0\ue201 【1†source】", children=["h"]
        ),
        "h": node(
            "a",
            "user",
            "hidden",
            children=["v"],
            metadata={"is_visually_hidden_from_conversation": True},
        ),
        "v": node(
            "h",
            "user",
            children=["f"],
            content={
                "content_type": "multimodal_text",
                "parts": [
                    {"content_type": "audio_transcription", "text": "spoken words"},
                    {"content_type": "audio_asset_pointer"},
                ],
            },
        ),
        "f": node("v", "assistant", "heard", children=["only"]),
        "only": node(
            "f", "user", children=[], content={"content_type": "multimodal_text", "parts": [image]}
        ),
    }
    draft = chatgpt_chat(conversation(mapping, current_node="only"))
    assert shape(draft) == [
        (None, "user", "what is this?"),
        (0, "assistant", "a cat "),
        (1, "user", "spoken words"),
        (2, "assistant", "heard"),
        (3, "user", "[Not imported: images]"),
        (4, "assistant", ""),
    ]
    assert draft.messages[5].status == "interrupted", "it can be tried again"
    assert draft.active_leaf == 5
    assert draft.lost == {
        "system messages": 1,
        "custom instructions": 1,
        "images": 2,
        "notes on reasoning": 1,
        "calls of tools": 1,
        "results of tools": 1,
        "references to sources": 2,
        "hidden messages": 1,
        "recordings": 1,
    }


def test_neighbours_of_one_role_become_one_message() -> None:
    mapping = {
        "hello": node(None, "assistant", "greeting", children=["q"]),
        "q": node("hello", "user", "one", children=["q'"]),
        "q'": node("q", "user", "two", children=["a"]),
        "a": node("q'", "assistant", "looking", children=["t"]),
        "t": node("a", "tool", "found", children=["b", "c"]),
        "b": node("t", "assistant", "ending one", children=["next"]),
        "c": node("t", "assistant", "ending two"),
        "next": node("b", "user", "more"),
    }
    draft = chatgpt_chat(conversation(mapping, current_node="c"))
    assert shape(draft) == [
        (None, "user", "one\n\ntwo"),
        (0, "assistant", "looking\n\nending one"),
        (1, "user", "more"),
        (0, "assistant", "looking\n\nending two"),
        (2, "assistant", ""),
    ]
    assert draft.active_leaf == 3
    assert draft.lost["answers before the first question"] == 1


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_any_mapping_gives_a_tree_of_turns(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"n{number}" for number in range(rng.randrange(1, 25))]
    mapping = {}
    for name in names:
        role = rng.choice(["user", "assistant", "user", "assistant", "tool", "system", "", "odd"])
        mapping[name] = node(
            rng.choice([*names, None, None, "nowhere"]),
            role,
            rng.choice(["", "text", name]),
            children=rng.choices(names, k=rng.randrange(3)),
            at=rng.choice([None, NOW, float("nan"), 1e300, -5, NOW + rng.random()]),
        )
    try:
        draft = chatgpt_chat(conversation(mapping, current_node=rng.choice(names)))
    except ImportFault:
        return  # no question in it
    answered = {one.parent for one in draft.messages}
    for index, message in enumerate(draft.messages):
        before = None if message.parent is None else draft.messages[message.parent]
        assert message.parent is None or message.parent < index
        assert (before.role if before else "assistant") != message.role
        assert message.role == "assistant" or index in answered
        assert message.created_at <= datetime.now(UTC)
    leaf = draft.messages[draft.active_leaf]
    assert leaf.role == "assistant"
    assert draft.active_leaf not in answered


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, "no mapping"),
        ({"mapping": []}, "no mapping"),
        ({"mapping": {"a": 1}}, "node a"),
        ({"mapping": {}}, "no message"),
        ({"mapping": {"a": node("b", "user", "x"), "b": node("a", "user", "y")}}, "no message"),
        ({"mapping": {"a": node(None, "assistant", "x")}}, "no message"),
    ],
)
def test_a_broken_conversation_says_what_is_wrong(data: dict[str, Any], says: str) -> None:
    with pytest.raises(ImportFault, match=says):
        chatgpt_chat(data)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"id": 5}, "lacks its id"),
        ({"messages": {}}, "lacks its id or its messages"),
        ({"messages": []}, "no message"),
        (
            {"messages": [{"id": "a", "role": "user", "status": "complete"}]},
            "message 1 has no text",
        ),
        ({"messages": [{"id": "a", "role": "system", "status": "complete"}]}, "unknown role"),
        ({"messages": [{"id": "a", "role": "user", "status": "odd"}]}, "unknown role or status"),
        ({"messages": ["text"]}, "message 1 lacks an id"),
    ],
)
def test_a_broken_chat_of_ours_says_what_is_wrong(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ImportFault, match=says):
        own_chat({"id": "x", "title": "t", "messages": [], **changes})


def test_texts_are_made_storable() -> None:
    mapping = {
        "q": node(None, "user", "a\0b\r\nc \ud83d", children=["a"]),
        "a": node("q", "assistant", "ok"),
    }
    draft = chatgpt_chat(conversation(mapping, title=" a\0\n title\ud800 " + "x" * 200))
    assert draft.messages[0].text == "a\ufffdb\nc \ufffd"
    assert draft.title == ("a title " + "x" * 200)[:120]
    assert draft.lost == {"characters that no text can have": 2}
    untitled = chatgpt_chat(conversation(TALK, title=None))
    assert untitled.title == "first question"


def test_the_key_is_that_of_the_conversation() -> None:
    one = chatgpt_chat(conversation(TALK))
    assert chatgpt_chat(conversation(TALK, title="renamed", update_time=NOW + 999)).key == one.key
    assert chatgpt_chat(conversation(TALK, conversation_id="c-2")).key != one.key
    bare = conversation(TALK)
    del bare["conversation_id"]
    assert chatgpt_chat(bare).key == chatgpt_chat(dict(bare)).key != one.key


# Files


def entries(data: bytes) -> list[Entry]:
    file = ImportFile(io.BytesIO(data))
    found = []
    while (entry := file.next()) is not None:
        found.append(entry)
    assert file.read_bytes <= file.total_bytes
    return found


def packed(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.just('\\"{}[],:'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(
    chats=st.lists(st.dictionaries(st.text(), JSON, max_size=4), min_size=1, max_size=6),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    chunk=st.integers(1, 40),
    own=st.booleans(),
)
def test_chats_are_cut_out_as_a_parser_reads_them(
    chats: list[dict[str, Any]], indent: int | None, ascii_only: bool, chunk: int, own: bool
) -> None:
    document: Any = chats
    if own:
        document = {"format": "rejoinder-chats", "version": 1, "x": [1, "]"], "chats": chats}
    data = json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_cutter, "CHUNK_BYTES", chunk)
        found = entries(data)
    assert [entry.data for entry in found] == chats
    assert [entry.number for entry in found] == list(range(1, len(chats) + 1))
    assert {entry.own for entry in found} == {own}


def test_a_zip_file_is_read_for_its_conversations() -> None:
    one, two = [conversation(TALK)], [conversation(TALK, conversation_id="c-2")]
    data = packed(
        {
            "user.json": b"{}",
            "export/conversations-001.json": json.dumps(two).encode(),
            "export/conversations-000.json": json.dumps(one).encode(),
            "chat.html": b"<html>",
        }
    )
    ids = [(entry.data or {})["conversation_id"] for entry in entries(data)]
    assert ids == ["c-1", "c-2"]
    alone = packed({"anything.json": json.dumps(one).encode()}, zipfile.ZIP_STORED)
    assert len(entries(alone)) == 1
    assert len(entries(json.dumps(one[0]).encode())) == 1, "one conversation without a list"
    assert len(entries(b"\xef\xbb\xbf \n" + json.dumps(one).encode())) == 1


def test_a_chat_that_is_no_object_is_named_and_passed_over() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    found = entries(b'[{"a": 1}, 5, ' + deep + b', {"b": tru}, {"c": 2}]')
    assert [entry.data for entry in found] == [{"a": 1}, None, None, None, {"c": 2}]
    assert found[3].number == 4
    assert found[3].problem


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "neither a JSON file nor a zip file"),
        (b"Hello", "neither a JSON file nor a zip file"),
        (b"\x89PNG\r\n", "neither a JSON file"),
        (b"[]", "no chat in this file"),
        (b'{"format": "rejoinder-chats", "version": 1, "chats": []}', "no chat in this file"),
        (b'{"format": "rejoinder-chats", "version": 2, "chats": [{}]}', "later version"),
        (b'{"chats": [{}], "format": "rejoinder-chats"}', "nowhere before its chats"),
        (b'{"format": "other", "version": 1, "chats": [{}]}', "nowhere before its chats"),
        (b'{"hello": 1}', "neither our format nor that of a ChatGPT export"),
        (b'[{"a": 1', "Chat 1: the file is cut off"),
        (b'[{"a": "x', "Chat 1: the file is cut off"),
        (b"PK\x03\x04 not really", "zip file is damaged"),
        (packed({"a.txt": b"x"}), "no conversations.json"),
        (packed({"a.json": b"[]", "b.json": b"[]"}), "no conversations.json"),
        (packed({"conversations.json": b"[{}]"}, zipfile.ZIP_LZMA), "packed in an unusual way"),
    ],
)
def test_files_that_are_none_of_ours_are_refused(data: bytes, says: str) -> None:
    with pytest.raises(ImportRefused, match=says):
        entries(data)


def test_a_file_that_is_cut_off_gives_what_comes_before() -> None:
    file = ImportFile(io.BytesIO(b'[{"a": 1}, {"b": 2}'))
    assert file.next() == Entry(1, False, {"a": 1})
    assert file.next() == Entry(2, False, {"b": 2})
    with pytest.raises(ImportRefused, match="cut off after chat 2"):
        file.next()


def test_zip_bombs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_file, "MAX_JSON_BYTES", 1 << 20)
    monkeypatch.setattr(import_file, "MAX_CHAT_BYTES", 1 << 18)
    bomb = packed({"conversations.json": b"[" + b" " * (2 << 20) + b"{}]"})
    assert len(bomb) < 10_000
    with pytest.raises(ImportRefused, match="2 MiB; up to 1 MiB"):
        entries(bomb)
    long_chat = packed({"conversations.json": b'[{"a": "' + b"x" * (1 << 19) + b'"}]'})
    with pytest.raises(ImportRefused, match="Chat 1: it has over 0 MiB"):
        entries(long_chat)
    # One that says it is small: what it says is all that is read of it.
    honest = packed({"conversations.json": b"[" + b'{"a": 1},' * 200_000 + b'{"a": 1}]'})
    at = honest.rindex(b"PK\x01\x02")
    liar = bytearray(honest)
    struct.pack_into("<L", liar, at + 24, 1000)
    with pytest.raises(ImportRefused):
        entries(bytes(liar))
    # A list of files longer than any real one.
    monkeypatch.setattr(import_file, "MAX_DIRECTORY_BYTES", 100)
    many = packed({f"{number}.txt": b"" for number in range(10)} | {"conversations.json": b"[{}]"})
    with pytest.raises(ImportRefused, match="too many files"):
        entries(many)
