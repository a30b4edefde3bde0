"""The model that the server has, as clients list it."""

from __future__ import annotations

from typing import Literal

import msgspec

from app.api.service import Api


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int = 0  # unknown
    owned_by: str = "rejoinder"
    max_model_len: int  # an addition to OpenAI's API: tokens of a chat, its answers included


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


def model_of(api: Api) -> Model:
    return Model(id=api.model_name, max_model_len=api.context_limit)
