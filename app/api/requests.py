"""The type of requests; the application's own would bring all of its parts along."""

from typing import Any

from litestar import Request
from litestar.datastructures import State

ApiRequest = Request[Any, Any, State]
