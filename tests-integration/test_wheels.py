"""The wheels themselves: what is in them, and that each installs and works alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import gemma3_support.tiny
import gemma4_support.tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
UV = Path(sys.executable).parent / "uv"
LLAMA = ROOT / "tests-integration" / "thirdparty" / "attnquant-llama"
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


# --- across installed distributions --------------------------------------------------

GEMMA3, GEMMA4, LLAMA_NAME = (
    "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "LlamaForCausalLM",
)
SETS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "core alone": (("attnquant-core",), ()),
    "core and gemma3": (("attnquant-gemma3",), (GEMMA3,)),
    "core and gemma4": (("attnquant-gemma4",), (GEMMA4,)),
    "all": (("attnquant-gemma3", "attnquant-gemma4"), (GEMMA3, GEMMA4)),
    "all and llama": (
        ("attnquant-gemma3", "attnquant-gemma4", "attnquant-llama"),
        (GEMMA3, GEMMA4, LLAMA_NAME),
    ),
}
"""What is asked for by name, and the architectures that are there then."""


class Installed:
    """A fresh environment that holds wheels, and what they need."""

    def __init__(self, folder: Path, wheels: Path, names: tuple[str, ...]) -> None:
        self.bin = folder / "bin"
        uv("venv", "--quiet", "--python", sys.executable, folder)
        uv(
            *("pip", "install", "--quiet", "--python", self.bin / "python"),
            *("--constraint", ROOT / "constraints.txt", "--find-links", wheels),
            *names,
        )

    def run(self, *command: str | Path, **environ: str) -> tuple[int, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("ATTNQUANT_")}
        done = subprocess.run(
            [str(self.bin / command[0]), *map(str, command[1:])],
            # Nowhere near the sources, which must not be what is imported.
            cwd=self.bin,
            env=clean
            | {"HF_HUB_OFFLINE": "1", "MODULAR_TELEMETRY_ENABLED": "0"}
            | environ,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheelhouse(wheels: dict[str, Path]) -> Path:
    """Give the folder of all wheels, the third party's among them."""
    folder = wheels["attnquant-core"].parent
    uv("build", "--quiet", "--wheel", "--out-dir", folder, LLAMA)
    return folder


@pytest.fixture(scope="module", params=SETS)
def installed(
    request: pytest.FixtureRequest,
    wheelhouse: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Installed, tuple[str, ...]]:
    names, architectures = SETS[request.param]
    folder = tmp_path_factory.mktemp("venv") / "venv"
    return Installed(folder, wheelhouse, names), architectures


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a tiny checkpoint of each architecture."""
    root = tmp_path_factory.mktemp("tiny")
    return {
        GEMMA3: gemma3_support.tiny.write_tiny_checkpoint(root / "gemma3"),
        GEMMA4: gemma4_support.tiny.write_tiny_checkpoint(root / "gemma4"),
        LLAMA_NAME: write_tiny_llama(root / "llama"),
    }


def write_tiny_llama(folder: Path) -> Path:
    """Write the checkpoint that the package's own tests describe."""
    code = """
import sys
from pathlib import Path
from attnquant.hookspecs import PrefixMap
from attnquant.testing.random_tensors import random_weights
from test_conformance import TestLlama

PREFIX_MAP = PrefixMap({"model.": "", "lm_head.": "lm_head."})
TestLlama.weights = lambda self: random_weights(self.tensor_shapes(), PREFIX_MAP)
TestLlama().write_checkpoint(Path(sys.argv[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, folder],
        cwd=LLAMA / "tests",
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_the_plugins_are_those_that_were_installed(
    installed: tuple[Installed, tuple[str, ...]],
) -> None:
    environment, expected = installed
    code, out = environment.run("attnquant", "plugins", "--json")
    assert code == 0, out
    plugins = json.loads(out)
    assert {plugin["state"] for plugin in plugins} <= {"loaded"}
    supplied = {name for plugin in plugins for name in plugin["architectures"]}
    assert supplied - {"Gemma4UnifiedForConditionalGeneration"} == set(expected)
    code, out = environment.run(
        "python", "-c", "import attnquant; print(attnquant.__file__)"
    )
    assert str(environment.bin.parent) in out


def test_each_supported_model_generates_and_each_other_is_refused(
    installed: tuple[Installed, tuple[str, ...]],
    checkpoints: dict[str, Path],
) -> None:
    environment, supported = installed
    for architecture, path in checkpoints.items():
        if architecture in supported:
            # In `dense`, whose graph the conformance tests compile as well.
            code, out = environment.run(
                *("max", "generate", "--model", path, "--prompt", "the"),
                *("--custom-architectures", "attnquant", "--devices", "cpu"),
                *("--quantization-encoding", "float32", "--max-length", "1024"),
                *("--max-new-tokens", "6", "--top-k", "1"),
                ATTNQUANT_FORMULATION="dense",
            )
            assert code == 0, out
        else:
            code, out = environment.run(
                *("attnquant", "decompose", path, "--out", path / "out"),
                *("--blocks", "2", "--rank", "4"),
            )
            assert code == 1, out
            assert f"{architecture}: expected one of" in out
            named = ", ".join(supported) if supported else "No AttnQuant plugin"
            assert named.partition(",")[0] in out
            assert "install" in out
