"""Chats on their way out and in: export of one or all, import with its progress."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import IO, cast

from litestar import Response, get, post
from litestar.datastructures import UploadFile
from litestar.enums import MediaType
from litestar.params import FromPath
from litestar.response import Stream

from app import pages
from app.errors import problem_of
from app.faults import Fault, InvalidField, NoSuchPage
from app.history import export
from app.history.import_file import MAX_JSON_BYTES, MAX_UPLOAD_BYTES, ImportFile
from app.history.json_cutter import MIB
from app.routes.browser import form_field, go_to, html, user_id_of
from app.security import csrf_token, ensure_user
from app.services import HTTPRequest, Services, UseServices, is_fragment
from app.views import Problem

FORM_BYTES = 1 << 16  # of the other fields


@get("/chats/{chat_id:str}/export/json", include_in_schema=False)
async def chat_json(request: HTTPRequest, services: UseServices, chat_id: FromPath[str]) -> Stream:
    chat = await pages.own_chat(services, await user_id_of(request), chat_id)
    chunks = export.json_chunks(services.repository, chat.user_id, [chat_id])
    return _download(chunks, f"{export.file_stem(chat.title)}.json", MediaType.JSON)


@get("/chats/{chat_id:str}/export/markdown", include_in_schema=False)
async def chat_markdown(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str]
) -> Response[bytes]:
    user_id = await user_id_of(request)
    chat = user_id and await services.repository.exported_chat(user_id, chat_id)
    if not chat:
        raise NoSuchPage
    name = f"{export.file_stem(chat.title)}.md"
    return Response(
        export.markdown(chat).encode(),
        media_type="text/markdown",
        headers={"Content-Disposition": export.content_disposition(name)},
    )


@get("/history/export/json", include_in_schema=False)
async def all_json(request: HTTPRequest, services: UseServices) -> Stream:
    user_id, chat_ids = await _all_chats(request, services)
    chunks = export.json_chunks(services.repository, user_id, chat_ids)
    return _download(chunks, f"rejoinder-chats-{_today()}.json", MediaType.JSON)


@get("/history/export/markdown", include_in_schema=False)
async def all_markdown(request: HTTPRequest, services: UseServices) -> Stream:
    user_id, chat_ids = await _all_chats(request, services)
    chunks = export.zip_chunks(services.repository, user_id, chat_ids)
    return _download(chunks, f"rejoinder-chats-{_today()}.zip", "application/zip")


@get("/history", include_in_schema=False)
async def page(request: HTTPRequest, services: UseServices) -> Response[str]:
    return html(await _page(request, services, await user_id_of(request)))


@post(
    "/history/import",
    include_in_schema=False,
    request_max_body_size=MAX_UPLOAD_BYTES + FORM_BYTES,
)
async def begin_import(request: HTTPRequest, services: UseServices) -> Response[str]:
    """Take a file and read it in the background; its page shows the progress."""
    user = await ensure_user(request)
    form = await request.form()
    upload = form.get("file")
    try:
        if not isinstance(upload, UploadFile):
            raise InvalidField("file", "Choose a file first.")
        assistant_id = await form_field(request, "assistant_id")
        known = {one.id: one for one in await services.repository.assistants(user.id)}
        if assistant_id not in known:
            raise InvalidField("assistant_id", "Choose one of the assistants shown.")
        file = await asyncio.to_thread(ImportFile, _kept(upload))
        job = await services.importer.start(
            user.id, known[assistant_id], file, upload.filename[:200]
        )
    except Fault as error:
        problem = problem_of(error)
        return html(await _page(request, services, user.id, problem=problem), problem=problem)
    return go_to(request, f"/history/imports/{job.id}")


@get("/history/imports/{job_id:str}", include_in_schema=False)
async def import_page(
    request: HTTPRequest, services: UseServices, job_id: FromPath[str]
) -> Response[str]:
    """How far an import is, or what it did."""
    user_id = await user_id_of(request)
    job = user_id and services.importer.get(user_id, job_id)
    if not job:
        raise NoSuchPage
    context = {**await pages.sidebar(services, user_id), "job": job}
    if is_fragment(request):
        token = csrf_token(request)
        return html(services.views.fragment("import_changed.html", csrf_token=token, **context))
    return html(services.views.page(request, "import.html", context))


async def _page(
    request: HTTPRequest,
    services: Services,
    user_id: str | None,
    *,
    problem: Problem | None = None,
) -> str:
    context = await pages.sidebar(services, user_id)
    context |= {
        "assistants": await services.repository.assistants(user_id),
        "count": len(await services.repository.chat_ids(user_id)) if user_id else 0,
        "max_upload_mib": MAX_UPLOAD_BYTES // MIB,
        "max_upload_bytes": MAX_UPLOAD_BYTES,
        "max_json_mib": MAX_JSON_BYTES // MIB,
        "job": services.importer.latest(user_id) if user_id else None,
        "problem": problem,
    }
    return services.views.page(request, "history.html", context)


async def _all_chats(request: HTTPRequest, services: Services) -> tuple[str, list[str]]:
    """A browser without a user has no chats: its export is a document without any."""
    user_id = await user_id_of(request) or ""
    return user_id, await services.repository.chat_ids(user_id)


def _kept(upload: UploadFile) -> IO[bytes]:
    """The uploaded file on, after its request; it has no name and leaves nothing behind."""
    upload.file.rollover()
    kept = os.fdopen(os.dup(upload.file.fileno()), "rb")
    kept.seek(0)
    return cast(IO[bytes], kept)


def _download(chunks: AsyncIterator[bytes], name: str, media_type: str) -> Stream:
    return Stream(
        chunks,
        media_type=media_type,
        headers={"Content-Disposition": export.content_disposition(name)},
    )


def _today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


HANDLERS = [
    chat_json,
    chat_markdown,
    all_json,
    all_markdown,
    page,
    begin_import,
    import_page,
]
