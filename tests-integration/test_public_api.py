"""The public API: documented whole, typed, and used as the documentation uses it."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from attnquant.hookspecs import PLUGIN_API_VERSION
from attnquant.theta.bundle import FORMAT_VERSION

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE = (DOCS / "public-api.md").read_text(encoding="utf-8")
FENCE_RE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODULES = (
    "attnquant.hookspecs",
    "attnquant.errors",
    "attnquant.theta",
    "attnquant.serving.api",
    "attnquant.testing",
)


def table(heading: str) -> list[str]:
    """Return the code in the first column of the table below a heading."""
    section = PAGE.partition(f"{heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE)


def test_the_page_lists_every_public_module() -> None:
    assert tuple(table("# Public API")) == MODULES


@pytest.mark.parametrize(
    "module", ["attnquant.hookspecs", "attnquant.serving.api", "attnquant.testing"]
)
def test_the_page_lists_every_public_name_of_a_module(module: str) -> None:
    assert sorted(table(f"## {module}")) == sorted(
        importlib.import_module(module).__all__
    )


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_there_and_says_what_it_is(module: str) -> None:
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", None) or [
        name for name in vars(loaded) if name.endswith("Error")
    ]
    assert names
    for name in names:
        value = getattr(loaded, name)
        if isinstance(value, type) or inspect.isroutine(value):
            assert value.__doc__, name


def mypy(tmp_path: Path, source: str, *options: str) -> str:
    """Check a file as somebody does who has core installed."""
    file = tmp_path / "usage.py"
    file.write_text(source, encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file", os.devnull, *options),
            *("--python-version", "3.11", "--cache-dir", str(tmp_path / "cache")),
            str(file),
        ],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


def test_documented_usage_is_well_typed(tmp_path: Path) -> None:
    (source,) = FENCE_RE.findall(PAGE)
    assert "Success" in mypy(tmp_path, source, "--strict")


def test_the_documented_plugin_is_well_typed(tmp_path: Path) -> None:
    page = (DOCS / "plugins.md").read_text(encoding="utf-8")
    # Modules of the plugin that the page only names.
    missing = "--ignore-missing-imports"
    source = "\n".join(FENCE_RE.findall(page))
    assert "Success" in mypy(tmp_path, source, "--check-untyped-defs", missing)


def test_wrong_usage_is_no_success(tmp_path: Path) -> None:
    wrong = 'from attnquant.testing import Setting\nSetting(shared_blocks="2")\n'
    assert "incompatible type" in mypy(tmp_path, wrong, "--strict")


def test_the_promises_name_the_versions_of_the_code() -> None:
    page = (DOCS / "versioning.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| the ([\w ]+) \|.*\| ([\d.]+) \|$", page, re.MULTILINE))
    assert rows["plugin API"] == str(PLUGIN_API_VERSION)
    assert rows["bundle format"] == str(FORMAT_VERSION)
    packages = importlib.import_module("attnquant").__version__
    assert packages.startswith(rows["packages"])
