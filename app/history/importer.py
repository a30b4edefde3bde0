"""Imports that run: a file is read chat by chat, each stored in a transaction of its own."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from secrets import token_hex

from app.assistants.shared_text import AssistantPrefixes
from app.faults import InvalidField
from app.history.import_file import Entry, ImportFile, ImportRefused
from app.history.import_formats import chatgpt_chat, own_chat
from app.history.import_tree import Draft, ImportFault
from engine.model.tokenizer import ChatTokenizer
from sessions.errors import SessionsError
from sessions.history_records import NewChat, NewMessage
from sessions.records import Assistant, Prefix
from sessions.repository import Repository

logger = logging.getLogger(__name__)

JOBS_KEPT = 100
NAMED = 100  # problems and long chats that are named one by one


class ImportRunning(InvalidField):
    """A user's imports run one after the other."""

    def __init__(self) -> None:
        super().__init__("file", "An import of yours is still running: wait for its end.")


@dataclass
class ImportJob:
    """How far an import is, and what became of its chats."""

    id: str
    user_id: str
    file_name: str
    assistant_name: str
    context_limit: int
    total_bytes: int
    read_bytes: int = 0
    running: bool = True
    new: int = 0
    known: int = 0
    restored: int = 0
    refused: int = 0
    problems: list[str] = field(default_factory=list)
    too_long: int = 0
    too_long_chats: list[tuple[str, str]] = field(default_factory=list)  # id and title
    lost: Counter[str] = field(default_factory=Counter)
    failure: str = ""  # why the rest of the file was not read

    @property
    def chats(self) -> int:
        return self.new + self.known + self.restored + self.refused

    @property
    def percent(self) -> int:
        return min(100, 100 * self.read_bytes // max(1, self.total_bytes))


class Importer:
    """Owns the running imports and the results of the latest ones. Event loop only."""

    def __init__(
        self,
        *,
        repository: Repository,
        tokenizer: ChatTokenizer,
        context_limit: Callable[[], int],
    ) -> None:
        self._repository = repository
        self._tokenizer = tokenizer
        self._context_limit = context_limit
        self._jobs: OrderedDict[str, ImportJob] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(
        self, user_id: str, assistant: Assistant, file: ImportFile, file_name: str
    ) -> ImportJob:
        """Begin an import. It closes the file, also when it raises ImportRunning."""
        latest = self.latest(user_id)
        if latest is not None and latest.running:
            file.close()
            raise ImportRunning
        job = ImportJob(
            id=token_hex(16),
            user_id=user_id,
            file_name=file_name,
            assistant_name=assistant.name,
            context_limit=self._context_limit(),
            total_bytes=file.total_bytes,
        )
        self._jobs[job.id] = job
        while len(self._jobs) > JOBS_KEPT:
            ended = next((key for key, one in self._jobs.items() if not one.running), None)
            if ended is None:
                break
            del self._jobs[ended]
        task = asyncio.create_task(self._run(job, assistant, file), name=f"import {job.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: file.close())  # also when it never came to run
        return job

    def get(self, user_id: str, job_id: str) -> ImportJob | None:
        """None when there is none of this user, or the server was started since."""
        job = self._jobs.get(job_id)
        return job if job is not None and job.user_id == user_id else None

    def latest(self, user_id: str) -> ImportJob | None:
        return next((job for job in reversed(self._jobs.values()) if job.user_id == user_id), None)

    async def close(self) -> None:
        """End what runs; the chats stored so far stay, and importing again adds the rest."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, job: ImportJob, assistant: Assistant, file: ImportFile) -> None:
        try:
            prefix = await self._prefix(assistant)
            while (entry := await asyncio.to_thread(file.next)) is not None:
                await self._take(job, prefix, entry)
                job.read_bytes = file.read_bytes
        except ImportRefused as error:
            job.failure = str(error)
        except asyncio.CancelledError:
            job.failure = "The server was stopped."
            raise
        except Exception:
            logger.exception("import %s failed", job.id)
            job.failure = "The server failed to read on; its log says why."
        finally:
            job.running = False

    async def _prefix(self, assistant: Assistant) -> Prefix:
        return await AssistantPrefixes(self._repository, self._tokenizer).current(assistant.id)

    async def _take(self, job: ImportJob, prefix: Prefix, entry: Entry) -> None:
        """Store one chat; what is wrong with it is noted and ends nothing."""
        try:
            draft = await asyncio.to_thread(_draft, entry)
            new = await asyncio.to_thread(self._with_tokens, draft)
            imported = await self._repository.import_chat(job.user_id, prefix.id, new)
        except ImportFault as error:
            _refuse(job, f"{_name(entry)}: {error}")
            return
        except (SessionsError, ValueError) as error:
            logger.warning("a chat of import %s cannot be stored: %s", job.id, error)
            _refuse(job, f"{_name(entry)}: it cannot be stored.")
            return
        match imported.how:
            case "known":
                job.known += 1
                return
            case "restored":
                job.restored += 1
                return
        job.new += 1
        job.lost += draft.lost
        tokens = len(prefix.token_ids) + sum(len(new.messages[at].token_ids) for at in _path(new))
        if tokens >= job.context_limit:
            job.too_long += 1
            if len(job.too_long_chats) < NAMED:
                job.too_long_chats.append((imported.chat_id, new.title))

    def _with_tokens(self, draft: Draft) -> NewChat:
        """The chat as it is stored: each text encoded so that it cannot become a control token."""
        messages = [
            NewMessage(
                parent=message.parent,
                role=message.role,
                text=message.text,
                token_ids=(
                    self._tokenizer.user_ids(message.text, first=message.parent is None)
                    if message.role == "user"
                    else self._tokenizer.encode_text(message.text)
                ),
                status=message.status,
                finish_reason=None,
                error=message.error,
                created_at=message.created_at,
                completed_at=message.completed_at,
            )
            for message in draft.messages
        ]
        return NewChat(
            key=draft.key,
            origin_id=draft.origin_id,
            title=draft.title,
            pinned=draft.pinned,
            created_at=draft.created_at,
            updated_at=draft.updated_at,
            messages=messages,
            active_leaf=draft.active_leaf,
        )


def _draft(entry: Entry) -> Draft:
    if entry.data is None:
        raise ImportFault(entry.problem + ".")
    return own_chat(entry.data) if entry.own else chatgpt_chat(entry.data)


def _path(chat: NewChat) -> list[int]:
    path = []
    at: int | None = chat.active_leaf
    while at is not None:
        path.append(at)
        at = chat.messages[at].parent
    return path


def _name(entry: Entry) -> str:
    title = (entry.data or {}).get("title")
    if isinstance(title, str) and title.strip():
        return f"Chat {entry.number}, “{title.strip()[:80]}”"
    return f"Chat {entry.number}"


def _refuse(job: ImportJob, problem: str) -> None:
    job.refused += 1
    if len(job.problems) < NAMED:
        job.problems.append(problem.encode("utf-8", "replace").decode())
