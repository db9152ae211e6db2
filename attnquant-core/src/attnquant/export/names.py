"""Canonical names back to those that an architecture's checkpoints have."""

from __future__ import annotations

from collections.abc import Iterable

from attnquant.errors import PluginError
from attnquant.theta.prefix_map import PrefixMap


def checkpoint_names(names: Iterable[str], prefix_map: PrefixMap) -> dict[str, str]:
    """Return each canonical name's name in a checkpoint.

    A prefix map leads from several ways of naming to one. Of the prefixes that lead to
    a name, those that say most of it come first (``lm_head.`` before nothing at all),
    and of these the one listed first.

    Args:
        names: Canonical names.
        prefix_map: The architecture's.

    Raises:
        PluginError: If no prefix leads to a name, or the way back leads elsewhere.
    """
    return {name: _checkpoint_name(name, prefix_map) for name in names}


def _checkpoint_name(name: str, prefix_map: PrefixMap) -> str:
    ways = [way for way in prefix_map.prefixes.items() if name.startswith(way[1])]
    # Stable: what is listed first stays first.
    ways.sort(key=lambda way: -len(way[1]))
    for checkpoint_prefix, prefix in ways:
        candidate = checkpoint_prefix + name.removeprefix(prefix)
        if prefix_map.canonical(candidate) == name:
            return candidate
    raise PluginError(
        "prefix map",
        expected=f"a prefix that leads to {name}",
        found=", ".join(repr(prefix) for prefix in prefix_map.prefixes) or "none",
    )
