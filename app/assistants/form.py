"""The form of an assistant: its fields, the draft that they make, and what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from litestar.datastructures import UploadFile
from litestar.datastructures.multi_dicts import FormMultiDict

from app.assistants.limits import (
    MAX_CHARS,
    MAX_DESCRIPTION,
    MAX_DOCUMENT_NAME,
    MAX_DOCUMENTS,
    MAX_FILE_BYTES,
    MAX_GREETING,
    MAX_NAME,
)
from app.assistants.sampling import NUMBERS, parse_sampling, sampling_fields
from app.faults import InvalidField
from sessions.assistant_records import AssistantDetail, AssistantDocument, AssistantDraft

ENDINGS = (".txt", ".md", ".markdown", ".text")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class AssistantForm:
    """What stands in the fields, right or wrong; `assistant_id` is "" for a new assistant."""

    assistant_id: str = ""
    revision: str = ""
    submission: str = ""
    name: str = ""
    description: str = ""
    greeting: str = ""
    system_prompt: str = ""
    documents: Sequence[AssistantDocument] = ()
    sampling: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, found: AssistantDetail) -> AssistantForm:
        return cls(
            assistant_id=found.id,
            revision=str(found.revision),
            name=found.name,
            description=found.description,
            greeting=found.greeting,
            system_prompt=found.version.system_prompt,
            documents=found.documents,
            sampling=sampling_fields(found.sampling),
        )

    def draft(self) -> AssistantDraft:
        """What is to be stored. Raises InvalidField for the first field that is not allowed."""
        documents = _checked(self.documents)
        chars = len(self.system_prompt) + sum(len(one.text) for one in documents)
        if chars > MAX_CHARS:
            raise InvalidField(
                "system_prompt",
                f"Prompt and documents have {chars:,} characters; up to {MAX_CHARS:,} can be kept.",
            )
        return AssistantDraft(
            name=_line("name", "The name", self.name, MAX_NAME),
            description=_line(
                "description", "The description", self.description, MAX_DESCRIPTION, empty=True
            ),
            greeting=_text("greeting", "The greeting", self.greeting, MAX_GREETING),
            system_prompt=_text(
                "system_prompt", "The system prompt", self.system_prompt, MAX_CHARS
            ),
            documents=documents,
            sampling=parse_sampling(lambda name: self.sampling.get(name, "")),
        )

    @property
    def num_chars(self) -> int:
        """Of prompt and documents."""
        return len(self.system_prompt) + sum(len(one.text) for one in self.documents)

    @property
    def revision_number(self) -> int:
        """0, which no assistant has, for what is no number."""
        given = self.revision
        return int(given) if given.isascii() and given.isdigit() and len(given) < 10 else 0

    def for_assistant(self, assistant_id: str) -> AssistantForm:
        return replace(self, assistant_id=assistant_id)

    def at_revision(self, revision: int) -> AssistantForm:
        """The same fields, to be stored over what is there now."""
        return replace(self, revision=str(revision))


async def read_form(
    fields: FormMultiDict, *, uploads: bool = True
) -> tuple[AssistantForm, InvalidField | None]:
    """The form as posted, uploaded files among its documents; and what is wrong with those.

    Line ends are LF from here on; nothing else of a text is changed.
    """

    def value(name: str) -> str:
        found = fields.getall(name, [])
        return found[-1].replace("\r\n", "\n") if found and isinstance(found[-1], str) else ""

    documents = _posted(fields)
    fault: InvalidField | None = None
    for upload in fields.getall("files", []) if uploads else []:
        if isinstance(upload, UploadFile) and upload.filename:
            try:
                documents.append(await _uploaded(upload))
            except InvalidField as error:
                fault = error
    form = AssistantForm(
        assistant_id=value("assistant_id"),
        revision=value("revision"),
        submission=value("submission"),
        name=value("name"),
        description=value("description"),
        greeting=value("greeting"),
        system_prompt=value("system_prompt"),
        documents=documents,
        sampling={name: value(name) for name in (*(one.name for one in NUMBERS), "stop")},
    )
    return form, fault


def _posted(fields: FormMultiDict) -> list[AssistantDocument]:
    """The documents of the page's fields, but for empty ones and those to be left out."""
    texts = [one for one in fields.getall("document_text", []) if isinstance(one, str)]
    names = [one for one in fields.getall("document_name", []) if isinstance(one, str)]
    left_out = set(fields.getall("document_left_out", []))
    found = []
    for number, text in enumerate(texts):
        name = names[number] if number < len(names) else ""
        if text.strip() and str(number) not in left_out:
            found.append(AssistantDocument(name=name.strip(), text=text.replace("\r\n", "\n")))
    return found


async def _uploaded(upload: UploadFile) -> AssistantDocument:
    """Raises InvalidField for what is no text file of at most `MAX_FILE_BYTES`."""
    name = re.split(r"[/\\]", upload.filename)[-1]
    if not name.lower().endswith(ENDINGS) and upload.content_type not in (
        "text/plain",
        "text/markdown",
    ):
        raise InvalidField(
            "files", f"{name[:80]!r} is no text file; take plain text or Markdown ({ENDINGS[0]}, "
            f"{ENDINGS[1]})."
        )  # fmt: skip
    data = await upload.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise InvalidField(
            "files", f"{name[:80]!r} is larger than {MAX_FILE_BYTES >> 20} MiB, the most of a file."
        )
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError:
        raise InvalidField(
            "files", f"{name[:80]!r} is no text in UTF-8; save it as that."
        ) from None
    if not text.strip():
        raise InvalidField("files", f"{name[:80]!r} is empty.")
    return AssistantDocument(name=name, text=text)


def _checked(documents: Sequence[AssistantDocument]) -> list[AssistantDocument]:
    if len(documents) > MAX_DOCUMENTS:
        raise InvalidField(
            "files", f"There are {len(documents)} documents; up to {MAX_DOCUMENTS} can be kept."
        )
    checked = []
    for number, one in enumerate(documents, 1):
        what = f"Document {number}"
        name = _line("documents", f"The name of document {number}", one.name, MAX_DOCUMENT_NAME,
                     empty=True)  # fmt: skip
        checked.append(replace(one, name=name or what, text=_text("documents", what, one.text)))
    return checked


def _line(name: str, what: str, raw: str, limit: int, *, empty: bool = False) -> str:
    text = _text(name, what, " ".join(raw.split()), limit)
    if not text and not empty:
        raise InvalidField(name, f"{what} is empty: write at least one character.")
    return text


def _text(name: str, what: str, text: str, limit: int = MAX_CHARS) -> str:
    if len(text) > limit:
        raise InvalidField(
            name, f"{what} has {len(text):,} characters; it can have up to {limit:,}."
        )
    if "\0" in text or _SURROGATE.search(text):
        raise InvalidField(name, f"{what} holds a character that no text can have.")
    return text
