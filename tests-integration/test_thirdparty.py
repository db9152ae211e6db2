"""The Llama package as anybody's: built, installed beside core, judged by the kit."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
LLAMA = ROOT / "tests-integration" / "thirdparty" / "attnquant-llama"
PUBLIC = (
    "attnquant.errors",
    "attnquant.hookspecs",
    "attnquant.serving.api",
    "attnquant.testing",
    "attnquant.theta",
)
"""The modules of core that others may import from, and only what they list."""


def imports(file: Path) -> list[tuple[str, str]]:
    """Return each name that a file imports from core, with its module."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
    return [pair for pair in found if pair[0].partition(".")[0] == "attnquant"]


@pytest.mark.parametrize(
    "file", sorted(LLAMA.rglob("*.py")), ids=lambda f: str(f.relative_to(LLAMA))
)
def test_only_public_names_of_core_are_imported(file: Path) -> None:
    for module, name in imports(file):
        assert module in PUBLIC, f"{module}.{name}"
        if module != "attnquant.errors":
            assert name in importlib.import_module(module).__all__, f"{module}.{name}"


def test_core_and_the_root_configuration_do_not_know_the_package() -> None:
    sources = [
        *(ROOT / "attnquant-core" / "src").rglob("*.py"),
        *(ROOT / name for name in ("pyproject.toml", "Makefile", "conftest.py")),
    ]
    assert len(sources) > 50
    for file in sources:
        text = file.read_text(encoding="utf-8")
        assert "attnquant_llama" not in text, file
        assert "attnquant-llama" not in text, file


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package's wheel into a folder."""
    root = tmp_path_factory.mktemp("thirdparty")
    run = lambda *words: subprocess.run(  # noqa: E731
        [str(word) for word in words],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    run(BIN / "uv", "build", "--quiet", "--wheel", "--out-dir", root, LLAMA)
    (wheel,) = root.glob("*.whl")
    run(
        *(BIN / "uv", "pip", "install", "--quiet", "--no-deps"),
        *("--python", sys.executable, "--target", root / "site", wheel),
    )
    return root / "site"


def pytest_of_the_package(site: Path, *arguments: str) -> str:
    done = subprocess.run(
        [BIN / "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=LLAMA,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_package_is_lint_free() -> None:
    for command in (
        [BIN / "ruff", "check", "--no-cache", "."],
        [BIN / "ruff", "format", "--check", "--no-cache", "."],
        [BIN / "mypy", "--cache-dir", os.devnull],
    ):
        done = subprocess.run(
            command,
            cwd=LLAMA,
            env=dict(os.environ),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_package_keeps_every_point_of_the_kit(site: Path) -> None:
    out = pytest_of_the_package(site, "-m", "not real_model")
    assert " passed" in out
    assert "failed" not in out


@pytest.mark.real_model
def test_smollm2_equals_transformers_and_chats(site: Path) -> None:
    model = ROOT / "build" / "smollm2-135m-instruct"
    subprocess.run(
        [sys.executable, LLAMA / "scripts" / "build_smollm2.py", "--out", model],
        env=dict(os.environ),
        check=True,
    )
    os.environ["SMOLLM2"] = str(model)
    try:
        out = pytest_of_the_package(site, "-m", "real_model")
    finally:
        del os.environ["SMOLLM2"]
    assert "3 passed" in out
