"""Tables and durations as text."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows in columns as wide as their widest cell."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def format_duration(seconds: float) -> str:
    """Return a duration in the unit that suits it: ``90 s``, ``12 min``, ``3.5 h``."""
    minute, hour = 60.0, 3600.0
    if seconds < 2 * minute:
        return f"{seconds:.0f} s"
    if seconds < 2 * hour:
        return f"{seconds / minute:.0f} min"
    return f"{seconds / hour:.1f} h"
