"""`attnquant plugins`: what was found, in which state, and why."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING

from attnquant.cli.text import format_table
from attnquant.plugins import Plugin, installed_plugins

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "plugins",
        help="list model plugins and their states",
        description="List every installed model plugin: which architectures it"
        " supplies, from which distribution, in which state, and why. Exits with 1 if"
        " a plugin is neither loaded nor disabled.",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the plugins; the exit code tells whether all is well."""
    # What a plugin prints while it is imported is not part of our answer.
    with contextlib.redirect_stdout(sys.stderr):
        found = installed_plugins()
    if options.json:
        print(json.dumps([summary(plugin) for plugin in found.plugins], indent=2))
    elif not found.plugins:
        print(found.explain())
    else:
        rows = [_row(plugin) for plugin in found.plugins]
        header = ("plugin", "architectures", "distribution", "state", "load")
        print(format_table(header, rows))
        for plugin in found.plugins:
            if plugin.reason:
                print(f"{plugin.name}: {plugin.reason}")
    for problem in found.problems:
        print(f"{problem.path}: {problem.text}", file=sys.stderr)
    return 1 if any(plugin.in_trouble for plugin in found.plugins) else 0


def summary(plugin: Plugin) -> dict[str, object]:
    """Return one plugin as JSON data; times in milliseconds."""
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "entry_point": plugin.entry_point,
        "state": plugin.state.value,
        "reason": plugin.reason,
        "architectures": [item.name for item in plugin.architectures],
        "load_ms": round(plugin.load_seconds * 1000, 1),
    }


def _row(plugin: Plugin) -> tuple[str, str, str, str, str]:
    return (
        plugin.name,
        ", ".join(item.name for item in plugin.architectures) or "unknown",
        plugin.origin,
        plugin.state.value,
        f"{plugin.load_seconds * 1000:.1f} ms",
    )
