"""W0 groups: which layers of a band may share a base at all."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TypeAlias

UNNAMED = ""
"""The one group of a uniform model."""


class NoBase(enum.Enum):
    """Why a projection has no shared base."""

    DENSE = "dense"
    """The checkpoint has it, and it stays as it is."""

    ABSENT = "absent"
    """The checkpoint has no such tensor."""


Group: TypeAlias = "str | NoBase"
"""A group's name, `UNNAMED`, or why there is none."""

Grouping: TypeAlias = Callable[[int, str], Group]
"""Maps a layer and a family to its group."""


def uniform(layer: int, family: str) -> Group:
    """Put every projection in the unnamed group: layers differ in nothing."""
    del layer, family
    return UNNAMED
