"""The seven projections of a decoder layer, and which of them share a base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from attnquant.errors import SettingError

ATTN_FAMILIES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_FAMILIES = ("gate_proj", "up_proj", "down_proj")
FAMILIES = ATTN_FAMILIES + MLP_FAMILIES

TIE_MODES = ("all", "attn")
"""The values of `tie_families`."""


def tied_families_for(tie_families: str) -> tuple[str, ...]:
    """Return the families that are decomposed under a tie mode.

    Args:
        tie_families: ``"all"`` (attention and MLP) or ``"attn"``.

    Returns:
        The `tied_projections`, in the order of `FAMILIES`.

    Raises:
        SettingError: If the mode is not one of `TIE_MODES`.
    """
    if tie_families not in TIE_MODES:
        raise SettingError(
            "tie_families",
            expected="one of " + ", ".join(TIE_MODES),
            found=repr(tie_families),
        )
    return FAMILIES if tie_families == "all" else ATTN_FAMILIES


def module_of(family: str) -> str:
    """Return the submodule of a decoder layer that holds a family."""
    return "self_attn" if family in ATTN_FAMILIES else "mlp"


@dataclass(frozen=True)
class PerFamily:
    """A whole number for each family: one for all, and others where they differ.

    Attributes:
        default: The number of families that are not named; None if there is none.
        named: Family to its own number.
    """

    default: int | None = None
    named: Mapping[str, int] = field(default_factory=dict)

    def of(self, family: str) -> int | None:
        """Return a family's number; None if nothing says it."""
        return self.named.get(family, self.default)

    def __str__(self) -> str:
        """Write it as `parse_per_family` reads it."""
        parts = [] if self.default is None else [str(self.default)]
        parts += [f"{family}={number}" for family, number in self.named.items()]
        return ",".join(parts)


def parse_per_family(text: str) -> PerFamily:
    """Read ``64``, ``q_proj=64,down_proj=16`` or ``18,q_proj=9``.

    Raises:
        ValueError: If it is none of these, or names a family twice.
    """
    default: int | None = None
    named: dict[str, int] = {}
    for part in text.split(","):
        family, equals, number = (piece.strip() for piece in part.rpartition("="))
        if equals and (family not in FAMILIES or family in named):
            msg = f"{family!r} is no family, or is named twice"
            raise ValueError(msg)
        if equals:
            named[family] = int(number)
        elif default is None:
            default = int(number)
        else:
            msg = f"two numbers for all families, {default} and {number}"
            raise ValueError(msg)
    return PerFamily(default, named)


def per_family(value: int | PerFamily | None) -> PerFamily:
    """Return a number for all families as what may differ between them."""
    return value if isinstance(value, PerFamily) else PerFamily(value)
