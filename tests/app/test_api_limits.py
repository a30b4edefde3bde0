"""Keys, bounds and fairness: who may ask, and how much at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from app.api.limits import FairQueue
from app.cli import main
from app.settings import Settings
from engine.turn_stream import Places
from sessions.migrate import upgrade
from tests.app.api_client import MODEL, chat_body, make_key, raw_client
from tests.app.fake_engine import FakeEngine
from tests.app.web_client import Server, serving

pytestmark = pytest.mark.anyio


@pytest.fixture
async def narrow(web_settings: Settings, fake_engine: FakeEngine) -> AsyncIterator[Server]:
    """A server that answers two requests at once, one of each user, and has one more wait."""
    fake_engine.places = Places(4)
    changes = {"max_batch": 2, "api_concurrency": 1, "api_queue": 1}
    async with serving(web_settings.model_copy(update=changes), fake_engine) as running:
        yield running


def code_of(response: httpx.Response) -> str:
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return str(body["code"])


async def test_only_bearer_keys_are_taken(server: Server, fake_engine: FakeEngine) -> None:
    fake_engine.auto = "Yes."
    key = await make_key(server)
    async with server.browser() as browser:
        await browser.new_chat("I am signed in")
        cookies = browser.http.cookies
    for headers in ({}, {"Authorization": key}, {"Authorization": f"Basic {key}"},
                    {"Authorization": "Bearer"}, {"Authorization": f"Bearer {key[:-1]}"},
                    {"Authorization": "Bearer rj-" + "A" * 43}, {"X-Api-Key": key}):  # fmt: skip
        async with httpx.AsyncClient(base_url=server.url, cookies=cookies) as http:
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions")):
                answer = await http.request(method, path, headers=headers, json=chat_body())
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
                assert code_of(answer) == "invalid_api_key"
                assert "set-cookie" not in answer.headers
    async with raw_client(server, key) as http:
        answer = await http.post("/chat/completions", json=chat_body())
        assert answer.status_code == 200, "no token of a form is asked for"
        foreign = {"Origin": "http://x.example"}
        answer = await http.post("/chat/completions", json=chat_body(), headers=foreign)
        assert answer.status_code == 403
        answer = await http.post("/chat/completions", content=b"{}", headers={"Host": "x.example"})
        assert answer.status_code == 400


async def test_only_json_is_taken(server: Server) -> None:
    async with raw_client(server, await make_key(server)) as http:
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
            answer = await http.post(
                "/chat/completions", content=b"{}", headers={"Content-Type": kind}
            )
            assert answer.status_code == 415
            assert code_of(answer) == "unsupported_media_type"


async def test_bodies_are_bounded(server: Server) -> None:
    async with raw_client(server, await make_key(server)) as http:
        answer = await http.post("/chat/completions", json=chat_body("x" * (9 << 20)))
        assert answer.status_code == 413
        assert code_of(answer) == "request_too_large"
        answer = await http.post("/chat/completions", json=chat_body("x" * 100_001))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[0].content"
        many = {"model": MODEL, "messages": [{"role": "user", "content": "x"}] * 2049}
        answer = await http.post("/chat/completions", json=many)
        assert answer.json()["error"]["param"] == "messages"


async def test_beyond_the_queue_requests_are_refused(
    narrow: Server, fake_engine: FakeEngine
) -> None:
    """Six at once, where one runs and one waits: four are told to come back."""
    async with raw_client(narrow, await make_key(narrow)) as http:
        asked = [
            asyncio.ensure_future(http.post("/chat/completions", json=chat_body(f"No. {n}")))
            for n in range(6)
        ]
        await fake_engine.next_turn(0)
        while sum(one.done() for one in asked) < 4:
            await asyncio.sleep(0.01)
        assert len(fake_engine.turns) == 1
        refused = [one.result() for one in asked if one.done()]
        assert {one.status_code for one in refused} == {429}
        assert all(int(one.headers["retry-after"]) >= 1 for one in refused)
        assert {code_of(one) for one in refused} == {"rate_limit_exceeded"}
        fake_engine.auto = "Yes."
        fake_engine.turns[0].say("Yes.")
        fake_engine.turns[0].end()
        answered = [await one for one in asked]
        assert sorted(one.status_code for one in answered) == [200, 200, 429, 429, 429, 429]


async def test_a_queued_client_that_leaves_never_runs(
    narrow: Server, fake_engine: FakeEngine
) -> None:
    async with raw_client(narrow, await make_key(narrow)) as http:
        first = asyncio.ensure_future(http.post("/chat/completions", json=chat_body("first")))
        turn = await fake_engine.next_turn(0)
        for stream in (False, True):
            waits = asyncio.ensure_future(
                http.post("/chat/completions", json=chat_body("gone", stream=stream))
            )
            queue = narrow.app.state.services.api.queue
            while not queue.waiting:
                await asyncio.sleep(0.01)
            waits.cancel()
            async with asyncio.timeout(1):
                while queue.waiting:
                    await asyncio.sleep(0.01)
        third = asyncio.ensure_future(http.post("/chat/completions", json=chat_body("third")))
        turn.end()
        await first
        turn = await fake_engine.next_turn(1)
        assert b"third" in bytes(t for t in turn.submit.new_ids if t < 256)
        turn.end()
        assert (await third).status_code == 200
        assert len(fake_engine.turns) == 2


async def test_one_users_many_requests_do_not_starve_another(
    web_settings: Settings, fake_engine: FakeEngine
) -> None:
    fake_engine.places = Places(8)
    changes = {"max_batch": 4, "api_concurrency": 4, "api_queue": 64}
    async with (
        serving(web_settings.model_copy(update=changes), fake_engine) as server,
        raw_client(server, await make_key(server)) as greedy,
        raw_client(server, await make_key(server)) as modest,
    ):
        many = [
            asyncio.ensure_future(greedy.post("/chat/completions", json=chat_body(f"g{n}")))
            for n in range(50)
        ]
        await fake_engine.next_turn(3)
        one = asyncio.ensure_future(modest.post("/chat/completions", json=chat_body("modest")))
        queue = server.app.state.services.api.queue
        while queue.waiting < 47:
            await asyncio.sleep(0.01)
        fake_engine.turns[0].end()
        next_one = await fake_engine.next_turn(4)
        assert b"modest" in bytes(t for t in next_one.submit.new_ids if t < 256)
        next_one.end()
        assert (await one).status_code == 200
        fake_engine.auto = "."
        for turn in fake_engine.turns[1:4]:
            turn.end()
        async with asyncio.timeout(20):
            while not all(task.done() for task in many):
                for turn in fake_engine.turns:
                    if not turn.stream.ended:
                        turn.end()
                await asyncio.sleep(0.01)
        assert {task.result().status_code for task in many} == {200}
        assert queue.running == queue.waiting == 0


async def test_a_key_has_a_limit_of_its_own(server: Server, fake_engine: FakeEngine) -> None:
    async with raw_client(server, await make_key(server, max_requests=1)) as http:
        first = asyncio.ensure_future(http.post("/chat/completions", json=chat_body()))
        turn = await fake_engine.next_turn(0)
        answer = await http.post("/chat/completions", json=chat_body())
        assert answer.status_code == 429
        turn.end()
        assert (await first).status_code == 200
        fake_engine.auto = "Yes."
        assert (await http.post("/chat/completions", json=chat_body())).status_code == 200


async def test_places_that_browsers_took_are_waited_for(
    server: Server, fake_engine: FakeEngine
) -> None:
    taken = [fake_engine.reserve() for _ in range(4)]
    async with raw_client(server, await make_key(server)) as http:
        asked = asyncio.ensure_future(http.post("/chat/completions", json=chat_body()))
        await asyncio.sleep(0.1)
        assert fake_engine.turns == []
        taken[0].release()
        (await fake_engine.next_turn(0)).end()
        assert (await asked).status_code == 200


async def test_server_that_ends_tells_its_streams(
    web_settings: Settings, fake_engine: FakeEngine
) -> None:
    async with serving(web_settings, fake_engine) as server:
        http = raw_client(server, await make_key(server))
        asked = asyncio.ensure_future(http.post("/chat/completions", json=chat_body(stream=True)))
        turn = await fake_engine.next_turn(0)
        turn.say("Half")
        server.app.state.services.api.end_streams()
        async with asyncio.timeout(5):
            answer = await asked
        assert "shutting down" in answer.text
        assert "[DONE]" not in answer.text
        await http.aclose()


def counted(**sizes: Any) -> FairQueue:
    return FairQueue(**{"slots": 4, "per_user": 3, "waiting_per_user": 9, **sizes})


async def test_free_slots_go_to_whoever_has_fewest() -> None:
    queue = counted()
    a = [queue.enter("a", "ka", None, 1) for _ in range(6)]
    b = [queue.enter("b", "kb", None, 1) for _ in range(3)]
    c = queue.enter("c", "kc", None, 2)
    granted = [one.granted.done() for one in (*a, *b, c)]
    assert granted == [True] * 3 + [False] * 3 + [True] + [False] * 3
    a[0].leave()
    a[0].leave()  # twice changes nothing
    assert not b[1].granted.done(), "c is the one with nothing, and needs two"
    a[1].leave()
    assert c.granted.done()
    c.leave()
    assert [one.granted.done() for one in (a[3], b[1])] == [True, True]
    for ticket in (*a, *b, c):
        ticket.leave()
    assert queue.running == queue.waiting == 0


async def test_a_cancelled_wait_does_not_take_a_slot() -> None:
    queue = counted(slots=1, per_user=1)
    first, second, third = (queue.enter("a", "k", None, 1) for _ in range(3))
    engine = FakeEngine()
    waiting = asyncio.ensure_future(second.places(engine))
    await asyncio.sleep(0)
    waiting.cancel()
    first.leave()  # the slot is granted to the second, which is on its way out
    await asyncio.wait([waiting])
    second.leave()
    assert third.granted.done()
    assert queue.running == 1


def test_keys_by_the_command_line(tmp_path: Path) -> None:
    upgrade(tmp_path / "rejoinder.db", tmp_path / "backups")

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["keys", *arguments, "--data-dir", str(tmp_path)])

    made = run("create", "laptop", "--limit", "5")
    key = made.stdout.strip()
    assert key.startswith("rj-")
    assert key.encode() not in (tmp_path / "rejoinder.db").read_bytes()
    [line] = run("list").stdout.splitlines()
    assert f"rj-...{key[-4:]}" in line
    assert "laptop" in line
    assert "up to 5 requests" in line
    assert "valid" in line
    key_id, user_id = line.split()[0], line.split(" user ")[1].split()[0]
    again = run("create", "desk", "--user", user_id)
    assert again.exit_code == 0
    assert run("revoke", key_id).exit_code == 0
    assert "revoked" in run("list").stdout.splitlines()[0]
    assert run("revoke", key_id).exit_code == 1
    assert run("create", "x", "--user", "nobody").exit_code == 1


async def test_a_revoked_key_is_refused_at_once(server: Server) -> None:
    async with raw_client(server, await make_key(server)) as http:
        assert (await http.get("/models")).status_code == 200
        [record] = await server.app.state.repository.api_keys()
        assert await server.app.state.repository.revoke_api_key(record.id)
        assert (await http.get("/models")).status_code == 401


async def test_a_foreign_host_is_told_in_the_shape_of_the_api(server: Server) -> None:
    async with raw_client(server, await make_key(server)) as http:
        refused = await http.get("/models", headers={"Host": "evil.example"})
        wrong = await http.get("/chat/completions")
    assert refused.status_code == 400
    assert refused.headers["content-type"] == "application/json"
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert "host" in refused.json()["error"]["message"]
    assert wrong.status_code == 405
    assert "POST" in wrong.headers["allow"]
