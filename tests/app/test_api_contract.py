"""The API against its own description: Schemathesis, as an outsider would run it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from engine.turn_stream import Places
from tests.app.api_client import make_key, raw_client
from tests.app.fake_engine import FakeEngine
from tests.app.web_client import Server

pytestmark = pytest.mark.anyio

# Larger than the server takes at all is refused too, before anything is read of it.
CONFIG = """
[checks]
negative_data_rejection.expected-statuses = [400, 401, 403, 404, 405, 409, 413, 415, 429]
"""


# The coverage phase tries every keyword of a schema, which takes minutes for the largest bodies.
LARGE = ("createChatCompletion", "createResponse", "tokenize", "warm")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "operations"),
    [
        (["--phases=fuzzing", "--max-examples=6"], 17),
        (["--phases=coverage", *(f"--exclude-operation-id={name}" for name in LARGE)], 13),
    ],
)
async def test_schemathesis_finds_nothing(
    server: Server,
    fake_engine: FakeEngine,
    tmp_path: Path,
    options: list[str],
    operations: int,
) -> None:
    fake_engine.auto = '{"a": 1}'
    fake_engine.places = Places(64)
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"{server.url}/v1/openapi.json",
        f"--header=Authorization: Bearer {await make_key(server)}",
        *options,
        "--seed=1",
        "--no-shrink",
        "--generation-database=none",
        "--no-color",
        # What fields mean together no schema says: `n` above what the server allows, and so on.
        # And the framework's own answer to OPTIONS names the methods of one handler only.
        "--exclude-checks=positive_data_acceptance,allow_header_conformance",
    ]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    said = output.decode()
    assert process.returncode == 0, said
    assert f"Tested: {operations}" in said, said


async def test_every_route_is_described(server: Server) -> None:
    async with raw_client(server, None) as http:
        document = (await http.get("/openapi.json")).json()
    described = {
        (method.upper(), path) for path, one in document["paths"].items() for method in one
    }
    routes = {
        (method, route.path_format.replace(":path", "").replace(":str", ""))
        for route in server.app.routes
        for method in route.methods
        if route.path_format.startswith("/v1/") and method != "OPTIONS"
    }
    assert routes - described == {("GET", "/v1/openapi.json")}
