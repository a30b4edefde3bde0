"""The model, and what it makes of texts."""

from __future__ import annotations

from litestar import get, post
from litestar.params import FromPath
from litestar.response.base import ASGIResponse

from app.api.bases import Bases
from app.api.bodies import read_body
from app.api.errors import no_such_model
from app.api.models import ModelList, model_of
from app.api.requests import ApiRequest
from app.api.service import DEFAULT_MODEL
from app.api.stored import StoredChats
from app.api.tokenising import TokenizeRequest, Warmed, WarmRequest, one_of, tokenize, warm_chat
from app.routes.v1.common import UseCaller, json_answer
from app.services import UseServices


@get("/models")
async def list_models(services: UseServices, caller: UseCaller) -> ASGIResponse:
    """The one model that the server has."""
    return json_answer(ModelList(data=[model_of(services.api)]))


@get("/models/{name:path}")
async def get_model(services: UseServices, caller: UseCaller, name: FromPath[str]) -> ASGIResponse:
    """That model by its name, which may hold a slash."""
    wanted = name.removeprefix("/")
    if wanted not in (services.api.model_name, DEFAULT_MODEL):
        raise no_such_model(wanted)
    return json_answer(model_of(services.api))


@post("/tokenize", status_code=200)
async def tokenize_text(
    request: ApiRequest, services: UseServices, caller: UseCaller
) -> ASGIResponse:
    """The token ids of a text or chat."""
    return json_answer(await tokenize(services.api, await read_body(request, TokenizeRequest)))


@post("/warm", status_code=200)
async def warm(request: ApiRequest, services: UseServices, caller: UseCaller) -> ASGIResponse:
    """Have the state of a chat brought back before it is needed."""
    body = await read_body(request, WarmRequest)
    services.api.check_model(body.model)
    chosen = one_of(body, "messages", "previous_response_id", "conversation")
    if chosen == "messages":
        return json_answer(await warm_chat(services.api, caller, body))
    bases = Bases(services.repository)
    if chosen == "conversation":
        found = await bases.conversation(caller, body.conversation or "", "conversation")
        base = await bases.after_conversation(found)
    else:
        base = await bases.after_response(caller, body.previous_response_id or "")
    known = await StoredChats(services.api).warm(caller, base)
    return json_answer(Warmed(known_tokens=known))


HANDLERS = [list_models, get_model, tokenize_text, warm]
