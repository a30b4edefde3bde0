"""Assistants: the list, a page each, the form with its counts, and a chat's move to the latest."""

from __future__ import annotations

import secrets
from typing import Any

from litestar import Response, get, post
from litestar.params import FromPath, FromQuery

from app import chat_pages, pages
from app.assistants.costs import PrefixCost
from app.assistants.form import AssistantForm, read_form
from app.assistants.limits import FORM_BYTES, MAX_CHARS, MAX_DOCUMENTS, MAX_FILE_BYTES
from app.assistants.sampling import NUMBERS, sampling_line
from app.assistants.service import NotYours, rights
from app.errors import DomainError, problem_of, problem_response
from app.faults import Fault, NoSuchPage
from app.routes.browser import form_field, go_to, html, user_id_of
from app.security import csrf_token, ensure_user, is_operator, require_operator
from app.services import HTTPRequest, Services, UseServices, is_fragment
from app.views import Problem
from sessions.assistant_records import AssistantDetail, AssistantDraft
from sessions.errors import AssistantChanged

SHOWN_NUMBERS = 3  # the others are under "More"
DONE = {
    "made": "It is saved, as version 1.",
    "saved": "It is saved.",
    "copied": "This is your own copy. Only you see it.",
    "published": "Everybody sees it now.",
    "private": "Only its owner sees it now. Chats that were begun with it go on.",
    "deleted": "It is deleted. Chats that were begun with it go on.",
}


@get("/assistants", include_in_schema=False)
async def assistant_list(
    request: HTTPRequest, services: UseServices, done: FromQuery[str] = ""
) -> Response[str]:
    user_id = await user_id_of(request)
    known = await services.repository.assistants(user_id)
    own = [one for one in known if not one.published]
    groups = [
        {
            "title": "Yours",
            "assistants": own,
            "empty": "You have none of your own yet. Write one, or copy one of those below.",
        },
        {
            "title": "For everybody",
            "assistants": [one for one in known if one.published],
            "empty": "There are none.",
        },
    ]
    context = await pages.sidebar(services, user_id)
    context |= {"groups": groups, "done": DONE.get(done, "")}
    return html(services.views.page(request, "assistants.html", context))


@get("/assistants/new", include_in_schema=False)
async def new(request: HTTPRequest, services: UseServices) -> Response[str]:
    form = AssistantForm(submission=secrets.token_hex(16))
    return html(await _form_page(request, services, form))


@get("/assistants/{assistant_id:str}", include_in_schema=False)
async def page(
    request: HTTPRequest,
    services: UseServices,
    assistant_id: FromPath[str],
    done: FromQuery[str] = "",
) -> Response[str]:
    user_id = await user_id_of(request)
    found = await services.assistants.find(user_id, assistant_id)
    context = await pages.sidebar(services, user_id)
    context |= {
        "assistant": found,
        "rights": rights(found, user_id, operator=await is_operator(request)),
        "cost": await services.assistants.cost(found.draft),
        "sharing": await services.assistants.costs.sharing(assistant_id),
        "uses": await services.repository.version_uses(assistant_id),
        "sampling": sampling_line(found.sampling),
        "done": DONE.get(done, ""),
    }
    return html(services.views.page(request, "assistant.html", context))


@get("/assistants/{assistant_id:str}/edit", include_in_schema=False)
async def edit(
    request: HTTPRequest, services: UseServices, assistant_id: FromPath[str]
) -> Response[str]:
    user_id = await user_id_of(request)
    found = await services.assistants.find(user_id, assistant_id)
    if not rights(found, user_id, operator=await is_operator(request)).edit:
        raise NotYours("This assistant is not yours to change. Copy it, and change the copy.")
    return html(await _form_page(request, services, AssistantForm.of(found)))


@post("/assistants/check", include_in_schema=False, request_max_body_size=FORM_BYTES)
async def check(request: HTTPRequest, services: UseServices) -> Response[str]:
    """The form again, with its counts and with uploaded files among its fields."""
    form, fault = await read_form(await request.form())
    problem = None if fault is None else problem_of(fault)
    return html(await _form_page(request, services, form, problem=problem), problem=problem)


@post("/assistants/preview", include_in_schema=False, request_max_body_size=FORM_BYTES)
async def preview(request: HTTPRequest, services: UseServices) -> Response[str]:
    """The counts of what stands in the form now."""
    form, _ = await read_form(await request.form(), uploads=False)
    cost = await _cost(services, form)
    return html(services.views.fragment("assistant_cost.html", cost=cost, max_chars=MAX_CHARS))


@post("/assistants/documents", include_in_schema=False, request_max_body_size=FORM_BYTES)
async def documents(request: HTTPRequest, services: UseServices) -> Response[str]:
    """The form's documents with uploaded and pasted ones taken in, and the counts."""
    form, fault = await read_form(await request.form())
    context = await _form_context(services, form, None if fault is None else problem_of(fault))
    return html(
        services.views.fragment(
            "assistant_documents_changed.html", csrf_token=csrf_token(request), **context
        )
    )


@post("/assistants", include_in_schema=False, request_max_body_size=FORM_BYTES)
async def create(request: HTTPRequest, services: UseServices) -> Response[str]:
    """A new private assistant. The same form sent twice makes one."""
    form, fault = await read_form(await request.form())
    try:
        if fault is not None:
            raise fault
        draft = form.draft()
        user = await ensure_user(request)

        async def make() -> str:
            return await services.assistants.create(user.id, draft)

        made = await services.submissions.once(user.id, form.submission, make)
    except Fault as error:
        problem = problem_of(error)
        return html(await _form_page(request, services, form, problem=problem), problem=problem)
    return go_to(request, f"/assistants/{made}?done=made")


@post("/assistants/{assistant_id:str}", include_in_schema=False, request_max_body_size=FORM_BYTES)
async def save(
    request: HTTPRequest, services: UseServices, assistant_id: FromPath[str]
) -> Response[str]:
    """What was changed since the form was made is told, and nothing of either is lost."""
    user_id = await user_id_of(request)
    form, fault = await read_form(await request.form())
    form = form.for_assistant(assistant_id)
    try:
        if fault is not None:
            raise fault
        await services.assistants.save(
            user_id,
            assistant_id,
            form.revision_number,
            form.draft(),
            operator=await is_operator(request),
        )
    except AssistantChanged as error:
        now = await services.assistants.find(user_id, assistant_id)
        problem = _changed(error)
        form = form.at_revision(now.revision)
        page = await _form_page(request, services, form, problem=problem, stale=now)
        return html(page, problem=problem)
    except (NoSuchPage, NotYours):
        raise
    except Fault as error:
        problem = problem_of(error)
        return html(await _form_page(request, services, form, problem=problem), problem=problem)
    return go_to(request, f"/assistants/{assistant_id}?done=saved")


@post("/assistants/{assistant_id:str}/duplicate", include_in_schema=False)
async def duplicate(
    request: HTTPRequest, services: UseServices, assistant_id: FromPath[str]
) -> Response[str]:
    await services.assistants.find(await user_id_of(request), assistant_id)
    user = await ensure_user(request)
    made = await services.assistants.duplicate(user.id, assistant_id)
    return go_to(request, f"/assistants/{made}?done=copied")


@post("/assistants/{assistant_id:str}/publish", include_in_schema=False)
async def publish(
    request: HTTPRequest, services: UseServices, assistant_id: FromPath[str]
) -> Response[str]:
    """For everybody; with `published` empty, for its owner alone again."""
    await require_operator(request)
    user_id = await user_id_of(request)
    published = bool(await form_field(request, "published"))
    await services.assistants.publish(user_id, assistant_id, published)
    if await services.repository.assistant(user_id, assistant_id) is None:
        return go_to(request, "/assistants?done=private")  # it is another user's
    done = "published" if published else "private"
    return go_to(request, f"/assistants/{assistant_id}?done={done}")


@post("/assistants/{assistant_id:str}/delete", include_in_schema=False)
async def delete(
    request: HTTPRequest, services: UseServices, assistant_id: FromPath[str]
) -> Response[str]:
    user_id = await user_id_of(request)
    operator = await is_operator(request)
    await services.assistants.delete(user_id, assistant_id, operator=operator)
    return go_to(request, "/assistants?done=deleted")


@post("/chats/{chat_id:str}/latest-version", include_in_schema=False)
async def move_chat(
    request: HTTPRequest, services: UseServices, chat_id: FromPath[str]
) -> Response[str]:
    """Put a chat on the latest version of its assistant; the next answer reads all of it anew."""
    chat = await pages.own_chat(services, await user_id_of(request), chat_id)
    try:
        await services.chat.move_to_latest(chat)
    except DomainError as error:
        problem = problem_of(error)
        if is_fragment(request):
            return problem_response(request, services.views, problem)
        return html(
            await chat_pages.chat_page(services, request, chat, problem=problem), problem=problem
        )
    return go_to(request, f"/chats/{chat_id}")


def _changed(error: AssistantChanged) -> Problem:
    return Problem(
        status=409,
        text="This assistant was changed in another tab, or by somebody else, since this form was "
        "opened. Nothing was saved.",
        hint="What you wrote is still here; what is saved now stands below it. Saving again "
        "replaces that.",
    )


async def _cost(services: Services, form: AssistantForm) -> PrefixCost | None:
    """Of what stands in the form; None when that is too long to be counted."""
    if form.num_chars > MAX_CHARS:
        return None
    draft = AssistantDraft(
        name="",
        description="",
        greeting="",
        system_prompt=form.system_prompt,
        documents=form.documents,
    )
    return await services.assistants.cost(draft)


async def _form_context(
    services: Services, form: AssistantForm, problem: Problem | None
) -> dict[str, Any]:
    return {
        "form": form,
        "problem": problem,
        "cost": await _cost(services, form),
        "numbers": NUMBERS,
        "more_numbers_set": any(form.sampling.get(one.name) for one in NUMBERS[SHOWN_NUMBERS:]),
        "max_documents": MAX_DOCUMENTS,
        "max_chars": MAX_CHARS,
        "max_file_mib": MAX_FILE_BYTES >> 20,
    }


async def _form_page(
    request: HTTPRequest,
    services: Services,
    form: AssistantForm,
    *,
    problem: Problem | None = None,
    stale: AssistantDetail | None = None,
) -> str:
    context = await pages.sidebar(services, await user_id_of(request))
    context |= await _form_context(services, form, problem)
    return services.views.page(request, "assistant_edit.html", {**context, "stale": stale})


HANDLERS = [
    assistant_list,
    new,
    page,
    edit,
    check,
    preview,
    documents,
    create,
    save,
    duplicate,
    publish,
    delete,
    move_chat,
]
