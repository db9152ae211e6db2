"""`attnquant cache`: what MAX keeps of what it compiled, and making room there."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from attnquant.cli.text import format_table
from attnquant.graph_cache import Entry, GraphCache, cache_folder
from attnquant.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its two actions."""
    parser = commands.add_parser(
        "cache",
        help="list or clear MAX's compile cache",
        description="`list` shows the compiled graphs in MAX's cache folder, those"
        " used longest ago first. `clear` removes them and the kernels that they were"
        " made of: whatever is served next is compiled anew.",
    )
    parser.add_argument("action", choices=("list", "clear"), help="what to do")
    parser.add_argument(
        "--larger-than",
        type=_size,
        metavar="SIZE",
        help="with clear: remove what was used longest ago until the cache is no"
        " larger than SIZE, such as 5GB, and no more",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.set_defaults(run=run)


def _size(text: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError:
        size = -1
    if size < 0:
        msg = f"expected a size such as 500MB or 5GB, found {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return size


def run(options: argparse.Namespace) -> int:
    """List the cache, or remove files from it."""
    cache = GraphCache(cache_folder())
    if options.action == "list":
        _list(cache, as_json=options.json)
        return 0
    removed = cache.shrink(options.larger_than or 0)
    left = cache.entries()
    if options.json:
        print(
            json.dumps(
                {
                    "folder": str(cache.folder),
                    "removed": [entry.path for entry in removed],
                    "removed_bytes": _total(removed),
                    "bytes": _total(left),
                },
                indent=2,
            )
        )
    else:
        print(
            f"{cache.folder}: removed {len(removed)} files"
            f" ({format_bytes(_total(removed))}), {format_bytes(_total(left))} left"
        )
    return 0


def _list(cache: GraphCache, *, as_json: bool) -> None:
    entries = cache.entries()
    graphs = [entry for entry in entries if entry.is_graph]
    if as_json:
        found = [
            {
                "graph": cache.graph_name(entry.path),
                "path": entry.path,
                "bytes": entry.size,
                "used": _day(entry),
            }
            for entry in graphs
        ]
        total = _total(entries)
        listed = {"folder": str(cache.folder), "bytes": total, "graphs": found}
        print(json.dumps(listed, indent=2))
        return
    rows = [
        (
            cache.graph_name(entry.path) or "unknown",
            format_bytes(entry.size),
            _day(entry),
            Path(entry.path).parent.name,
            Path(entry.path).name,
        )
        for entry in graphs
    ]
    print(format_table(("graph", "size", "last used", "MAX", "file"), rows))
    print(
        f"{cache.folder}: {len(graphs)} graphs of {format_bytes(_total(graphs))},"
        f" {len(entries) - len(graphs)} kernel files of"
        f" {format_bytes(_total(entries) - _total(graphs))}"
    )


def _day(entry: Entry) -> str:
    return datetime.fromtimestamp(entry.used, UTC).date().isoformat()


def _total(entries: Sequence[Entry]) -> int:
    return sum(entry.size for entry in entries)
