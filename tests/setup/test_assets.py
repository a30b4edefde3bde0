"""Front-end files: what is pinned, what is copied, and that no address is written anywhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from app.progress import StepFailed
from app.setup_assets import FILES, PICO, VENDOR, copy_files, extract_images, set_up_assets

ROOT = Path(__file__).parent.parent.parent
SETUP_FILES = (
    "package.json",
    "package-lock.json",
    ".npmrc",
    "pyproject.toml",
    "Makefile",
    ".ci/run",
    "app/bootstrap.py",
    "app/setup_assets.py",
    "app/setup_model.py",
    "app/progress.py",
)


@pytest.mark.parametrize("name", SETUP_FILES)
def test_set_up_names_packages_never_addresses(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "://" not in text
    assert "registry=" not in text
    assert not re.search(r"--(extra-)?index-url|--find-links|--registry", text)


def test_the_lock_file_pins_every_package_by_digest_alone() -> None:
    lock = json.loads((ROOT / "package-lock.json").read_text())
    package = json.loads((ROOT / "package.json").read_text())
    locked = {name: entry for name, entry in lock["packages"].items() if name}
    wanted = package["dependencies"] | package["devDependencies"]
    assert {name.removeprefix("node_modules/") for name in locked} == wanted.keys()
    for name, entry in locked.items():
        assert entry["version"] == wanted[name.removeprefix("node_modules/")]
        assert entry["integrity"].startswith("sha512-")
        assert "resolved" not in entry


def test_python_packages_are_pinned_exactly() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pinned = [*project["dependencies"], *extras["otel"], *extras["dev"]]
    pinned.remove("rejoinder[otel]")  # the tests need that extra too
    exact = re.compile(r"[\w-]+(\[\w+\])?==[\w.]+(; [^;]+)?")  # and where it is installed
    assert [line for line in pinned if not exact.fullmatch(line)] == []
    assert not any("==" in line.split(";")[0] for line in extras["cuda"])


def _node_modules(root: Path) -> Path:
    for name in FILES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / PICO).parent.mkdir(parents=True)
    (root / PICO).write_text("a{color:red}")
    return root


def test_every_file_must_be_there(tmp_path: Path) -> None:
    modules = _node_modules(tmp_path / "node_modules")
    (tmp_path / "out").mkdir()
    copy_files(modules, tmp_path / "out")
    names = {Path(name).name for name in (*FILES, PICO)}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    (modules / FILES[1]).unlink()
    with pytest.raises(StepFailed, match=r"lacks htmx\.org/dist/ext/hx-sse\.min\.js"):
        copy_files(modules, tmp_path / "out")


def test_inline_images_become_files_that_the_policy_allows(tmp_path: Path) -> None:
    css = (
        "a{background:url(\"data:image/svg+xml,%3Csvg fill='none'%3E%3C/svg%3E\") no-repeat}"
        'b{background:url("other.png")}'
    )
    changed = extract_images(css, tmp_path)
    (icon,) = tmp_path.iterdir()
    assert icon.read_text() == "<svg fill='none'></svg>"
    expected = f'a{{background:url("{icon.name}") no-repeat}}b{{background:url("other.png")}}'
    assert changed == expected


def test_what_set_up_made_loads_nothing_from_elsewhere() -> None:
    set_up_assets(print, dev=True)
    css = (VENDOR / "pico.min.css").read_text()
    assert "data:" not in css
    targets = re.findall(r"url\([\"']?([^)\"']+)", css)
    assert len(targets) >= 10
    for target in targets:
        assert (VENDOR / target).is_file()
    for name in ("htmx.min.js", "hx-sse.min.js", "uPlot.iife.min.js", "uPlot.min.css"):
        assert (VENDOR / name).stat().st_size > 1000
