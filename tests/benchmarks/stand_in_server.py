"""A stand-in for a chat server: says numbered words, and notes every request in a file.

Usage as llama.cpp's server: `stand_in_server.py NOTES -m ... --port P`. SHORT in the environment
makes it end its answers one token early.
"""

from __future__ import annotations

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    notes = sys.argv[1]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with open(self.notes, "a") as file:
            file.write(json.dumps([self.path, body]) + "\n")
        if self.path.startswith("/slots/"):
            self._send(200, b"{}")
        elif self.path == "/v1/responses":
            self._responses(body)
        else:
            self._completions(body)

    def _completions(self, body: dict[str, Any]) -> None:
        count = body["max_tokens"] - ("SHORT" in os.environ)
        events = [{"choices": [{"delta": {"content": f"w{n} "}}]} for n in range(count)]
        cached = 10 * (len(body["messages"]) > 2)
        end = {"choices": [], "usage": {"completion_tokens": count}, "timings": {"cache_n": cached}}
        self._stream([*events, end])

    def _responses(self, body: dict[str, Any]) -> None:
        count = body["max_output_tokens"]
        events: list[Any] = [{"type": "response.output_text.delta", "delta": "w "}] * count
        before = body.get("previous_response_id")
        cached = {"cached_tokens": 10 if before else 0}
        usage = {"output_tokens": count, "input_tokens_details": cached}
        name = f"resp_{int(before.split('_')[1]) + 1 if before else 1}"
        end = {"type": "response.incomplete", "response": {"id": name, "usage": usage}}
        self._stream([*events, end])

    def _stream(self, events: list[Any]) -> None:
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"]
        self._send(200, "".join(lines).encode(), "text/event-stream")

    def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
