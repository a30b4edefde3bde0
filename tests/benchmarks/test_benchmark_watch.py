"""Parts of the benchmark of watching: the model that never ends, browsers that only read."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.endless import NEVER_SAMPLED, endless_model
from engine.model.model_config import read_model_config

ROOT = Path(__file__).parents[2]


def test_the_endless_model_differs_by_its_end_token_alone(tiny_model: Path, tmp_path: Path) -> None:
    before = read_model_config(tiny_model)
    copy = endless_model(tiny_model, tmp_path)
    after = read_model_config(copy)
    assert after.eos_token_ids == (NEVER_SAMPLED,) != before.eos_token_ids
    assert (after.num_layers, after.hidden_size) == (before.num_layers, before.hidden_size)
    for file in copy.glob("*.safetensors"):
        assert file.read_bytes() == (tiny_model / file.name).read_bytes()


def test_watchers_read_their_streams_and_leave_them_when_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        watchers = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.watchers", str(port)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watchers.stdin is not None
        assert watchers.stdout is not None

        def tell(streams: list[tuple[str, str]]) -> dict[str, int]:
            """What the streams before had brought."""
            assert watchers.stdin is not None
            assert watchers.stdout is not None
            print(json.dumps(streams), file=watchers.stdin, flush=True)
            brought: dict[str, int] = json.loads(watchers.stdout.readline())
            return brought

        with watchers:
            assert tell([("/one", "login=a"), ("/two", "login=b")]) == {"bytes": 0, "events": 0}
            asked = []
            for _ in range(2):
                stream, _ = server.accept()
                with stream:
                    asked.append(stream.recv(4096).decode())
                    stream.sendall(b"data: x\n\ndata: y\n\n")  # 18 bytes
            assert sorted(text.split()[1] for text in asked) == ["/one", "/two"]
            assert "Cookie: login=a\r\n" in min(asked)
            time.sleep(0.5)
            assert tell([]) == {"bytes": 36, "events": 4}
            assert tell([]) == {"bytes": 0, "events": 0}
            watchers.stdin.close()
            assert watchers.wait(10) == 0
