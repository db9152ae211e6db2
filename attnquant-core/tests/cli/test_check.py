"""`attnquant check`: the kit from the command line, told in sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core_support.plugins import TINY_PLUGIN, install, supplying
from core_support.processes import Done, Run, attnquant, environment

CONFORMANCE = """
from attnquant.testing import ModelConformance, Setting


class TestTiny(ModelConformance):
    architecture = "TinyForCausalLM"
    setting = Setting(2, 3)
    config = {
        "architectures": ["TinyForCausalLM"],
        "num_hidden_layers": 4,
        "vocab_size": 320,
        "max_position_embeddings": 64,
    }

    def tensor_shapes(self):
        shapes = {"model.embed_tokens.weight": (320, 12), "model.norm.weight": (12,)}
        dims = {"q": (16, 12), "k": (8, 12), "v": (8, 12), "o": (12, 16)}
        mlp = {"gate": (20, 12), "up": (20, 12), "down": (12, 20)}
        for i in range(4):
            for part, shape in dims.items():
                shapes[f"model.layers.{i}.self_attn.{part}_proj.weight"] = shape
            for part, shape in mlp.items():
                shapes[f"model.layers.{i}.mlp.{part}_proj.weight"] = shape
            shapes[f"model.layers.{i}.input_layernorm.weight"] = (12,)
        return shapes
"""
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "attnquant-tiny"
version = "1.0"
license-files = ["LICENSE"]
requires-python = ">=3.11"
dependencies = ["attnquant-core"]

[project.entry-points."attnquant.models"]
tiny = "fake_tiny"

[tool.hatch.build.targets.wheel]
packages = ["fake_tiny"]

[tool.pytest.ini_options]
addopts = "-ra"
"""


def package(folder: Path, source: str = TINY_PLUGIN) -> Path:
    """Write the sources of a package; its tests are in `tests`."""
    module = folder / "fake_tiny"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text(source)
    (module / "py.typed").touch()
    (folder / "LICENSE").write_text("as you like\n")
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "tests").mkdir()
    (folder / "tests" / "test_conformance.py").write_text(CONFORMANCE)
    return folder


def check(project: Path, site: Path, *arguments: str) -> Done:
    """Check the package as if it were installed as editable in a folder."""
    install(site, "tiny", None, value="fake_tiny")
    (info,) = site.glob("*.dist-info")
    origin = {"url": project.as_uri(), "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(origin))
    env = environment(site)
    env["PYTHONPATH"] = f"{site}:{project}"
    return attnquant("check", "tiny", "--parts", "structural", *arguments, env=env)


def test_a_package_that_keeps_every_point_passes(tmp_path: Path) -> None:
    done = check(package(tmp_path / "project"), tmp_path / "site")
    assert done.code == 0, done.out + done.err
    *lines, verdict = done.out.splitlines()
    assert verdict == f"tiny keeps all {len(lines)} points."
    assert len(lines) >= 20
    assert all(line.startswith("ok      structural") for line in lines)


@pytest.mark.parametrize(
    ("good", "bad", "told"),
    [
        ('{"model.": "", ', '{"": "", ', "A tensor that no model of this architecture"),
        ('"lm_head.": "lm_head."', '"model.layers.0.": "layers.1."', "one canonical"),
    ],
)
def test_a_point_that_is_not_kept_is_told_in_a_sentence(
    tmp_path: Path, good: str, bad: str, told: str
) -> None:
    assert good in TINY_PLUGIN
    source = "import torch\n" + TINY_PLUGIN.replace(good, bad)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "torch.py").touch()
    done = check(package(tmp_path / "project", source), tmp_path / "site")
    assert done.code == 1
    failed = [line for line in done.out.splitlines() if line.startswith("FAILED")]
    assert any("hooks 1 to 3 need no MAX" in line for line in failed)
    assert any(told in line for line in failed), done.out
    assert done.out.splitlines()[-1].startswith(f"tiny fails {len(failed)} of")


def test_tests_without_the_kit_are_no_verdict(tmp_path: Path) -> None:
    project = package(tmp_path / "project")
    (project / "tests" / "test_conformance.py").write_text("def test_x(): ...\n")
    done = check(project, tmp_path / "site")
    assert done.code == 1
    assert "no subclass of attnquant.testing.ModelConformance" in done.out


def test_tests_that_do_not_import_are_shown(tmp_path: Path) -> None:
    project = package(tmp_path / "project")
    (project / "tests" / "test_conformance.py").write_text("1 / 0\n")
    done = check(project, tmp_path / "site")
    assert done.code == 1
    assert "ZeroDivisionError" in done.out


# --- what cannot be checked --------------------------------------------------------


def test_a_plugin_that_is_not_there_is_named(run: Run, home: Path) -> None:
    install(home, "a", supplying("A"))
    assert "plugin b: expected one of a" in run("check", "b").error()


def test_a_plugin_that_is_not_loaded_says_why(run: Run, home: Path) -> None:
    install(home, "a", "raise ValueError('no luck')")
    error = run("check", "a").error()
    assert "found one that is failed" in error
    assert "ValueError: no luck" in error


def test_a_wheel_has_no_tests_beside_it(run: Run, home: Path) -> None:
    install(home, "a", supplying("A"))
    error = run("check", "a").error()
    assert "--tests: expected the folder of attnquant-a's tests" in error


def test_an_unknown_part_is_refused(run: Run, home: Path) -> None:
    install(home, "a", supplying("A"))
    error = run("check", "a", "--parts", "structural,other").error()
    assert error == "--parts: expected among structural, hooks, serving, found 'other'"


def test_tests_that_are_not_there_are_named(run: Run, home: Path) -> None:
    install(home, "a", supplying("A"))
    error = run("check", "a", "--tests", home / "nowhere").error()
    assert f"found {home / 'nowhere'}" in error
