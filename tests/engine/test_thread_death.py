"""A thread of the engine process that fails ends the process instead of leaving it mute."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.framing import frame
from tests.engine.scripted_engine import INFO

ROOT = Path(__file__).parents[2]
PROGRAM = """
import logging, socket, sys
import engine.process

def broken(message):
    raise RuntimeError("it cannot be written")

class Core:
    info = {info!r}
    def has_work(self): return False
    def idle_wait(self): return 60.0
    def close(self): pass

logging.basicConfig(level="INFO")
engine.process.frame = broken
sock = socket.socket(fileno=int(sys.argv[1]))
sys.exit(engine.process.serve(lambda config, emit: Core(), sock))
"""


def test_a_sender_that_fails_ends_the_process_with_a_reason() -> None:
    ours, theirs = socket.socketpair()
    program = PROGRAM.replace("{info!r}", repr(msgspec.json.encode(INFO)))
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(theirs.fileno())],
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        ours.sendall(frame(EngineConfig(model_dir="", model_name="")))
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the thread sender failed, so the engine ends" in said
    assert "it cannot be written" in said
