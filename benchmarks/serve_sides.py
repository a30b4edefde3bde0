"""The servers that `benchmarks.serve` puts its load on, each used as its own users would use it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from app.api.key_admin import create_key
from benchmarks.endless import endless_model
from benchmarks.http_process import HttpProcess, answers
from benchmarks.load import Exchange
from benchmarks.report import Refused, progress
from sessions.migrate import upgrade

TIMEOUT = httpx.Timeout(600.0)
SERVES = re.compile(r"Rejoinder serves on (http://\S+)")
IDLE_EVICT_S = 1.0  # of ours: what waits longer has left memory, as it has on the other side
ROOT = Path(__file__).parent.parent


@dataclass
class Answer:
    """What one turn brought: times in seconds of one clock, tokens as the server counts them."""

    asked: float
    arrivals: list[float] = field(default_factory=list)  # of pieces of text
    tokens: int = 0
    cached: int = 0  # prompt tokens that were not computed


class Conversation(Protocol):
    """One chat of the load on one server."""

    async def ask(self, exchange: Exchange) -> Answer:
        """Send a question and read the whole answer. Raises Refused."""
        ...


class Side(Protocol):
    key: str
    name: str
    version: str

    def start(self, directory: Path, chats: int) -> None: ...

    def conversation(self, http: httpx.AsyncClient, number: int) -> Conversation: ...

    def stop(self) -> None: ...


async def _events(
    http: httpx.AsyncClient, url: str, body: dict[str, Any], headers: dict[str, str]
) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each event of a streamed answer. Raises Refused for an error."""
    async with http.stream("POST", url, json=body, headers=headers, timeout=TIMEOUT) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            raise Refused(f"{url} answered {response.status_code}: {text[:300]}")
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])


class Ours:
    """Stateful: each turn sends its question and the id of the answer before it."""

    key, name = "ours", "Rejoinder"

    def __init__(self, model_dir: Path, dtype: str, system_prompt: str) -> None:
        self._model_dir, self._dtype, self.system_prompt = model_dir, dtype, system_prompt
        self.version = "this tree"
        self._process: HttpProcess | None = None
        self.url = ""
        self.key_of_api = ""

    def start(self, directory: Path, chats: int) -> None:
        data = directory / "data"
        database = data / "rejoinder.db"
        upgrade(database, data / "backups", progress)
        self.key_of_api, _ = create_key(database, "benchmark", None, chats)
        command = [sys.executable, "-c", "from app.cli import main; main()", "serve"]
        command += ["--data-dir", str(data), "--port", "0", "--dtype", self._dtype]
        command += ["--model", str(endless_model(self._model_dir, directory))]
        command += ["--idle-evict-s", str(IDLE_EVICT_S), "--api-concurrency", str(chats)]
        environment = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        process = HttpProcess(command, directory / "ours.log", environment)
        self._process = process

        def served() -> str | None:
            found = SERVES.search(process.log_text())
            return found[1] if found and answers(f"{found[1]}/readyz") else None

        self.url = process.wait_for(served)

    def conversation(self, http: httpx.AsyncClient, number: int) -> Conversation:
        return _OurChat(self, http, {"Authorization": f"Bearer {self.key_of_api}"})

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


class _OurChat:
    def __init__(self, side: Ours, http: httpx.AsyncClient, headers: dict[str, str]) -> None:
        self._side, self._http, self._headers = side, http, headers
        self._last: str | None = None

    async def ask(self, exchange: Exchange) -> Answer:
        question = {"role": "user", "content": exchange.question}
        system = {"role": "system", "content": self._side.system_prompt}
        body: dict[str, Any] = {
            "model": "default",
            "input": [question] if self._last else [system, question],
            "previous_response_id": self._last,
            "max_output_tokens": exchange.tokens,
            "temperature": 0,
            "stream": True,
        }
        answer = Answer(asked=time.perf_counter())
        async for event in _events(
            self._http, f"{self._side.url}/v1/responses", body, self._headers
        ):
            if event["type"] == "response.output_text.delta":
                answer.arrivals.append(time.perf_counter())
            elif event["type"] in ("response.completed", "response.incomplete"):
                response = event["response"]
                self._last = response["id"]
                answer.tokens = response["usage"]["output_tokens"]
                answer.cached = response["usage"]["input_tokens_details"]["cached_tokens"]
            elif event["type"] in ("error", "response.failed"):
                raise Refused(f"the answer failed: {event}")
        return answer


class LlamaServer:
    """llama.cpp's server: a slot a chat, saved to disk after each turn, restored before the next.

    That is how its users keep a chat beyond the slot's life: by hand, with `--slot-save-path`. The
    client keeps the history and sends all of it each time.
    """

    key, name = "llamacpp", "llama.cpp server"

    def __init__(self, binary: Path, gguf: Path, threads: int, context: int, prompt: str) -> None:
        self._binary, self._gguf = binary.expanduser().absolute(), gguf
        self._threads, self._context = threads, context
        self.system_prompt = prompt
        self.version = "unknown"
        self._process: HttpProcess | None = None
        self.url = ""

    def start(self, directory: Path, chats: int) -> None:
        slots = directory / "slots"
        slots.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options: dict[str, object] = {
            "-m": self._gguf,
            "-np": chats,
            "-c": chats * self._context,
            "-t": self._threads,
            "-tb": self._threads,
            "--slot-save-path": slots,
            "--host": "127.0.0.1",
            "--port": port,
        }
        command = [str(self._binary), *(str(part) for pair in options.items() for part in pair)]
        process = HttpProcess(command, directory / "llama.log")
        self._process = process
        url = f"http://127.0.0.1:{port}"
        self.url = process.wait_for(lambda: url if answers(f"{url}/health") else None)
        found = re.search(r"build(?:_info)?: *(\S+ ?\S*)", process.log_text())
        self.version = found[1] if found else "unknown"

    def conversation(self, http: httpx.AsyncClient, number: int) -> Conversation:
        return _LlamaChat(self, http, number)

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


class _LlamaChat:
    def __init__(self, side: LlamaServer, http: httpx.AsyncClient, slot: int) -> None:
        self._side, self._http, self._slot = side, http, slot
        self._messages = [{"role": "system", "content": side.system_prompt}]

    async def ask(self, exchange: Exchange) -> Answer:
        returning = len(self._messages) > 1
        self._messages.append({"role": "user", "content": exchange.question})
        answer = Answer(asked=time.perf_counter())
        if returning:
            await self._act("restore")
        body: dict[str, Any] = {
            "messages": self._messages,
            "max_tokens": exchange.tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "id_slot": self._slot,
            "cache_prompt": True,
            "ignore_eos": True,
        }
        text = ""
        async for event in _events(self._http, f"{self._side.url}/v1/chat/completions", body, {}):
            for choice in event.get("choices", []):
                piece = choice["delta"].get("content")
                if piece:
                    text += piece
                    answer.arrivals.append(time.perf_counter())
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
                answer.cached = event.get("timings", {}).get("cache_n", 0)
        self._messages.append({"role": "assistant", "content": text})
        await self._act("save")
        await self._act("erase")
        return answer

    async def _act(self, action: str) -> None:
        url = f"{self._side.url}/slots/{self._slot}?action={action}"
        body = {} if action == "erase" else {"filename": f"chat{self._slot}.bin"}
        for _ in range(2000):
            response = await self._http.post(url, json=body, timeout=TIMEOUT)
            if response.status_code != 503:  # the slot is busy: its last turn is being ended
                break
            await asyncio.sleep(0.005)
        if response.status_code != 200:
            raise Refused(f"llama.cpp could not {action} a slot: {response.text[:300]}")
