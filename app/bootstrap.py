"""First part of the set-up: the virtual environment. Runs on a bare Python 3.11, no packages.

`python -m app.bootstrap` makes .venv, installs the pinned dependencies and hands over to
`rejoinder setup`. What is up to date is skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from app.progress import Progress, StepFailed, run_command, run_pip, step

ROOT = Path(__file__).parent.parent
VENV = ROOT / ".venv"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> int:
    """Set up and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m app.bootstrap")
    parser.add_argument("--dev", action="store_true", help="also what tests and checks need")
    parser.add_argument("--browser", action="store_true", help="also a browser for the tests")
    parser.add_argument("--tools-only", action="store_true", help="stop after the packages")
    arguments = parser.parse_args()
    try:
        if not (VENV / "bin" / "python").exists():
            with step("making the virtual environment") as progress:
                _make_venv(progress)
        install_packages(dev=arguments.dev)
        if arguments.browser and not any(shutil.which(name) for name in BROWSERS):
            with step("installing Chromium for the browser tests") as progress:
                install_browser(progress)
    except StepFailed as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    if arguments.tools_only:
        return 0
    command = [str(VENV / "bin" / "rejoinder"), "setup"]
    command += ["--dev"] if arguments.dev else []
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def _make_venv(progress: Progress) -> None:
    try:
        run_command([sys.executable, "-m", "venv", VENV], progress)
    except StepFailed as error:
        shutil.rmtree(VENV, ignore_errors=True)
        raise StepFailed(
            f"{error}. On Debian and Ubuntu the module venv comes with the package python3-venv"
        ) from error


def install_packages(*, dev: bool) -> None:
    """Install what pyproject.toml pins unless that was done for this very file."""
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    stamps = {name: VENV / f".installed-{name}" for name in ("run", "dev")}
    for name, stamp in stamps.items():
        if (name == "dev" or not dev) and stamp.is_file() and stamp.read_text() == wanted:
            return
    with step("installing dependencies (some 500 MB when nothing is cached)") as progress:
        target = f"{ROOT}[dev]" if dev else str(ROOT)
        run_pip(VENV / "bin" / "python", ["install", "--editable", target], progress)
        for name, stamp in stamps.items():
            if name == "run" or dev:
                stamp.write_text(wanted)


def install_browser(progress: Progress) -> None:
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        raise StepFailed(
            "the browser tests need Chromium, and only root can install it here: "
            "install the package chromium and try again"
        )
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    run_command(["apt-get", "update", "-q"], progress)
    run_command(["apt-get", "install", "-q", "-y", "--no-install-recommends", "chromium"], progress)


if __name__ == "__main__":
    sys.exit(main())
