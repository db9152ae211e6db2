"""Sizes in bytes, as text and back."""

from __future__ import annotations

from decimal import Decimal


def format_bytes(count: int) -> str:
    """Return a size in decimal units: ``536.2 MB``."""
    size, step = float(count), 1000
    for unit in ("B", "kB", "MB", "GB"):
        if size < step:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= step
    return f"{size:.1f} TB"


_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(text: str) -> int:
    """Read a size in decimal units, ``300MB`` or ``1.5 GB``; a bare number is bytes.

    Raises:
        ValueError: If it is none, or not a whole number of bytes.
    """
    unit = next((u for u in sorted(_UNITS, key=len)[::-1] if text.endswith(u)), "")
    try:
        size = Decimal(text.removesuffix(unit).strip()) * _UNITS.get(unit, 1)
    except ArithmeticError:
        raise ValueError(text) from None
    if not size.is_finite() or size != int(size):
        raise ValueError(text)
    return int(size)
