"""The wheels themselves: what is in them, and that each installs and works alone."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
UV = Path(sys.executable).parent / "uv"
PACKAGES = sorted(path.parent.name for path in ROOT.glob("attnquant-*/pyproject.toml"))


def run(*command: str) -> subprocess.CompletedProcess[str]:
    # The environment as Python has it: MAX, once imported, changes the process's own
    # in ways that lead a child's Python astray.
    return subprocess.run(
        command, env=dict(os.environ), capture_output=True, text=True, check=False
    )


def uv(*arguments: str | Path) -> None:
    done = run(str(UV), *map(str, arguments))
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("wheels")
    for package in PACKAGES:
        uv("build", "--quiet", "--wheel", "--out-dir", out, ROOT / package)
    return {
        package: next(out.glob(f"{package.replace('-', '_')}-*.whl"))
        for package in PACKAGES
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_holds_every_source_file_typing_and_licence(
    wheels: dict[str, Path], package: str
) -> None:
    with zipfile.ZipFile(wheels[package]) as wheel:
        names = set(wheel.namelist())
    source = ROOT / package / "src"
    expected = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected <= names
    assert any(name.endswith("py.typed") for name in names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any("test" in Path(name).name for name in names - expected)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_says_what_it_needs_and_nothing_local(
    wheels: dict[str, Path], package: str
) -> None:
    with zipfile.ZipFile(wheels[package]) as wheel:
        (name,) = [n for n in wheel.namelist() if n.endswith("METADATA")]
        metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata.get_payload().strip(), "a README is shown on the index"
    declared = tomllib.loads((ROOT / package / "pyproject.toml").read_text())
    requirements = metadata.get_all("Requires-Dist") or []
    assert len(declared["project"].get("dependencies", [])) <= len(requirements)
    assert not any("file:" in requirement for requirement in requirements)


def test_core_installs_alone_and_works_without_max(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    environment = tmp_path / "venv"
    uv("venv", "--quiet", "--python", sys.executable, environment)
    python = environment / "bin" / "python"
    uv("pip", "install", "--quiet", "--python", python, wheels["attnquant-core"])
    command = [str(environment / "bin" / "attnquant"), "plugins"]
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert "No AttnQuant plugin is installed" in done.stdout
    code = "import importlib.util as u, attnquant.theta; print(u.find_spec('max'))"
    done = run(str(python), "-c", code)
    assert done.stdout == "None\n", done.stderr


def test_kernels_install_alone(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    uv("venv", "--quiet", "--python", sys.executable, environment)
    python = environment / "bin" / "python"
    uv("pip", "install", "--quiet", "--python", python, wheels["attnquant-kernels"])
    code = "import attnquant_kernels as k; print(k.mojo_package().is_dir())"
    done = run(str(python), "-c", code)
    assert done.stdout == "True\n", done.stderr
