"""`attnquant check`: a model package's conformance tests, told in sentences."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import importlib_metadata

from attnquant.errors import PluginError, SettingError
from attnquant.plugins import Plugin, State, installed_plugins
from attnquant.testing.parts import PARTS

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "check",
        help="run the conformance tests of a plugin",
        description="Run the conformance kit on a plugin, as its package's tests set"
        " it up, and say which points it keeps. Exits with 0 if it keeps all that"
        " were looked at, 1 otherwise.",
    )
    parser.add_argument("name", metavar="NAME", help="the plugin's name")
    parser.add_argument(
        "--tests",
        type=Path,
        metavar="PATH",
        help="the file or folder of its tests; by default `tests` beside the sources"
        " of a package that is installed as editable",
    )
    parser.add_argument(
        "--parts",
        metavar="PART[,PART]",
        default=",".join(PARTS),
        help="what to look at: "
        + "; ".join(f"{name} ({text})" for name, text in PARTS.items())
        + "; by default all",
    )
    parser.add_argument(
        "--all-graphs",
        action="store_true",
        help="compile every formulation at passthrough as well",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the tests and print what each found."""
    for part in options.parts.split(","):
        if part.strip() not in PARTS:
            raise SettingError(
                "--parts", expected="among " + ", ".join(PARTS), found=repr(part)
            )
    plugin = _plugin(options.name)
    tests = options.tests or _tests_of(plugin)
    if not tests.exists():
        raise SettingError(
            "--tests", expected="a file or folder of tests", found=str(tests)
        )
    if find_spec("pytest") is None:
        raise SettingError(
            "attnquant check",
            expected="pytest",
            found="none installed",
            hint='Run `pip install "attnquant-core[testing]"`.',
        )
    command = [
        *(sys.executable, "-m", "pytest", "-p", "attnquant.testing.report"),
        *("--attnquant-plugin", plugin.name, "--attnquant-parts", options.parts),
        *(["--attnquant-all-graphs"] if options.all_graphs else []),
        str(tests),
    ]
    # In a process of its own: pytest must be there before what it rewrites.
    done = subprocess.run(command, env=dict(os.environ), check=False)  # noqa: S603
    return 1 if done.returncode else 0


def _plugin(name: str) -> Plugin:
    found = {plugin.name: plugin for plugin in installed_plugins().plugins}
    if name not in found:
        raise PluginError(
            f"plugin {name}",
            expected="one of " + (", ".join(sorted(found)) or "none (no plugin)"),
            found="no installed plugin of this name",
        )
    plugin = found[name]
    if plugin.state is not State.LOADED:
        raise PluginError(
            f"plugin {name} ({plugin.origin})",
            expected="a plugin that is loaded",
            found=f"one that is {plugin.state.value}",
            hint=plugin.reason,
        )
    return plugin


def _tests_of(plugin: Plugin) -> Path:
    """Return the folder of tests beside the sources of an editable installation."""
    text = importlib_metadata.distribution(plugin.distribution).read_text(
        "direct_url.json"
    )
    origin = json.loads(text) if text else {}
    if not origin.get("dir_info", {}).get("editable"):
        raise SettingError(
            "--tests",
            expected=f"the folder of {plugin.distribution}'s tests",
            found="nothing, and the package is not installed as editable",
            hint="Wheels hold no tests: give the path of the package's sources.",
        )
    return Path(unquote(urlsplit(origin["url"]).path)) / "tests"
