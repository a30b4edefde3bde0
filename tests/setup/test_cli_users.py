"""The command line of accounts: from the first operator's link to a new password."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from app.accounts.names import name_of
from app.cli import main
from app.cli_users import _run
from app.security.login import hash_token
from app.settings import Settings
from sessions.account_records import NewLogin
from sessions.migrate import upgrade
from sessions.repository import Repository

LINK = re.compile(r"(https?://\S+)/(invitations|new-password)/([A-Za-z0-9_-]{43})\n")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    upgrade(tmp_path / "rejoinder.db", tmp_path / "backups")
    return Settings(data_dir=tmp_path)


def run(settings: Settings, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["users", *arguments, "--data-dir", str(settings.data_dir)])


def test_from_the_first_operator_to_a_new_password(settings: Settings) -> None:
    assert "users invite --operator" in run(settings, "list").stderr
    invited = run(settings, "invite", "--operator", "--public-url", "https://chat.example.org/")
    match = LINK.fullmatch(invited.stdout)
    assert match is not None
    assert match[1] == "https://chat.example.org"

    async def join(repository: Repository) -> None:
        new = NewLogin(token_hash="hash of the login")
        link = hash_token(match[3])
        await repository.register(
            link, name_of("Ada"), "password hash", new, old_hash=None, take_along=False
        )

    _run(settings, join)
    assert re.fullmatch(
        r"Ada  \(operator, 0 chats, last seen [^)]+\)\n", run(settings, "list").stdout
    )
    assert run(settings, "disable", "ada").stdout == "Ada is disabled\n"
    assert ", disabled 2" in run(settings, "list").stdout
    assert _run(settings, lambda one: one.user_by_token("hash of the login")) is None
    assert run(settings, "enable", "ADA").stdout == "Ada is enabled\n"
    reset = LINK.fullmatch(run(settings, "reset-password", "Ada").stdout)
    assert reset is not None
    assert (reset[1], reset[2]) == ("http://127.0.0.1:8000", "new-password")
    user = _run(settings, lambda one: one.reset_password(hash_token(reset[3]), "newer hash"))
    assert user.name == "Ada"


@pytest.mark.parametrize("command", ["disable", "enable", "reset-password"])
def test_an_unknown_name_is_said(settings: Settings, command: str) -> None:
    result = run(settings, command, "nobody")
    assert result.exit_code == 1
    assert "there is no account 'nobody'" in result.output


def test_links_begin_as_the_server_is_reached(settings: Settings) -> None:
    for options, begins in (
        (["--host", "0.0.0.0", "--allowed-hosts", "chat.lan"], "http://chat.lan:8000/"),
        (["--host", "::1", "--port", "9000"], "http://[::1]:9000/"),
        (["--host", "192.0.2.7"], "http://192.0.2.7:8000/"),
    ):
        assert run(settings, "invite", *options).stdout.startswith(begins), options
