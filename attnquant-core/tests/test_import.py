"""Imports: cheap, without MAX, and without collecting anything."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from attnquant.theta.bundle import open_bundle
from core_support.plugins import TINY_PLUGIN, install
from core_support.processes import environment, python
from core_support.tiny import (
    ARCHITECTURE,
    tiny_config,
    tiny_weights,
    write_checkpoint,
)

HEAVY = ["max", "transformers", "torch"]

IMPORTED = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps(sorted(sys.modules)))
"""


def imported_by(module: str) -> set[str]:
    done = python(IMPORTED, module)
    assert done.stderr == ""
    return set(json.loads(done.stdout))


@pytest.mark.parametrize(
    "module",
    [
        "attnquant",
        "attnquant.theta",
        "attnquant.theta.writer",
        "attnquant.cli.main",
        "attnquant.plugins",
        "attnquant.settings",
        "attnquant.hookspecs",
        "attnquant.registry",
    ],
)
def test_the_offline_half_imports_no_max(module: str) -> None:
    assert imported_by(module).isdisjoint(HEAVY)


def test_the_package_itself_imports_no_numpy_and_no_plugin() -> None:
    imported = imported_by("attnquant")
    assert imported.isdisjoint(["numpy", "pluggy", "safetensors"])
    assert [name for name in imported if name.startswith("attnquant")] == ["attnquant"]


def test_no_architecture_is_collected_on_import() -> None:
    done = python("import attnquant.plugins; print('ARCHITECTURES' in vars(attnquant))")
    assert done.stdout == "False\n"


@pytest.mark.parametrize("module", ["attnquant.cli.main", "attnquant.registry"])
def test_no_plugin_is_imported_before_it_is_asked_for(
    tmp_path: Path, module: str
) -> None:
    install(tmp_path, "a", "raise SystemExit('imported')")
    done = python(f"import {module}; print('fine')", env=environment(tmp_path))
    assert (done.stdout, done.stderr) == ("fine\n", "")


TIMED = """
import time
import pluggy, numpy
started = time.perf_counter()
import attnquant
print(time.perf_counter() - started)
"""


def test_the_package_adds_under_a_tenth_of_a_second_to_pluggy_and_numpy() -> None:
    seconds = [float(python(TIMED).stdout) for _ in range(5)]
    assert statistics.median(seconds) < 0.1


WITHOUT_MAX = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("max", "transformers", "torch"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from attnquant.cli.main import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("plugin", "architecture"),
    [("tiny", ARCHITECTURE), ("gemma3", "Gemma3ForCausalLM")],
)
def test_bundles_are_made_and_shown_where_max_is_not_installed(
    tmp_path: Path, plugin: str, architecture: str
) -> None:
    home = tmp_path / "site-packages"
    install(home, "tiny", TINY_PLUGIN)
    config = tiny_config(3, architectures=[architecture])
    model = write_checkpoint(tmp_path / "model", tiny_weights(3), config)
    out = tmp_path / "bundle"
    env = environment(home, ATTNQUANT_PLUGINS=plugin)
    options = ["--out", out, "--blocks", 2, "--rank", 3]
    done = python(WITHOUT_MAX, "decompose", model, *options, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert open_bundle(out).checkpoint.architecture == architecture
    for command in (["inspect", out], ["plugins"]):
        done = python(WITHOUT_MAX, *command, env=env)
        assert (done.returncode, done.stderr) == (0, "")


BUDGET = """
import time
import attnquant.plugins
started = time.perf_counter()
found = attnquant.plugins.installed_plugins()
seconds = time.perf_counter() - started
assert len(found.supplied) >= 2, found
print(seconds)
"""


def test_registering_all_installed_plugins_stays_under_50_ms() -> None:
    # The least of several: what is above it is the machine being busy with others.
    assert min(float(python(BUDGET).stdout) for _ in range(5)) < 0.05
