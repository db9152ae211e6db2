"""`attnquant plugins`: what was found, in which state, and why."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from attnquant.cli.text import format_table
from attnquant.plugins import Plugin, State, installed_plugins

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
    found = installed_plugins()
    if options.json:
        print(json.dumps([summary(plugin) for plugin in found.plugins], indent=2))
    elif not found.plugins:
        print(found.explain())
    else:
        rows = [_row(plugin) for plugin in found.plugins]
        header = ("plugin", "architectures", "distribution", "state")
        print(format_table(header, rows))
        for plugin in found.plugins:
            if plugin.reason:
                print(f"{plugin.name}: {plugin.reason}")
    well = {State.LOADED, State.DISABLED}
    return 0 if all(plugin.state in well for plugin in found.plugins) else 1


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


def _row(plugin: Plugin) -> tuple[str, str, str, str]:
    return (
        plugin.name,
        ", ".join(item.name for item in plugin.architectures) or "unknown",
        f"{plugin.distribution} {plugin.version}",
        plugin.state.value,
    )
