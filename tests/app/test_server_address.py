"""Where the server listens: known before anything slow is started."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner

from app.cli import main
from app.server import AddressUnusable, bind


def bound_to(host: str, port: int = 0) -> list[tuple[str, int]]:
    with ExitStack() as at_end:
        sockets = [at_end.enter_context(one) for one in bind(host, port)]
        return [one.getsockname()[:2] for one in sockets]


def test_the_addresses_of_a_host_are_bound() -> None:
    [(host, port)] = bound_to("127.0.0.1")
    assert host == "127.0.0.1"
    assert port > 0
    assert ("127.0.0.1", port) in bound_to("127.0.0.1", port), "a port just left can be had again"


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("192.0.2.1", "192.0.2.1 is no address of this machine"),
        ("no such host", "--host no such host is no address"),
        ("a" * 64 + ".example", "is no address of a machine"),
    ],
)
def test_a_host_that_is_not_ours_is_named(host: str, says: str) -> None:
    with pytest.raises(AddressUnusable, match=says):
        bind(host, 0)


def test_a_taken_port_is_said_in_one_sentence_before_the_engine_starts(
    web_template: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ["--migrate", "--data-dir", str(tmp_path), "--port", str(port)]
        arguments += ["--model", str(web_template / "model")]
        result = CliRunner().invoke(main, ["serve", *arguments])
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == (
        f"Error: port {port} of 127.0.0.1 is in use, maybe by another server; "
        "stop it, or choose another port with --port"
    )
    assert "starting the engine" not in result.output
