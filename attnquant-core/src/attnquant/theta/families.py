"""The seven projections of a decoder layer, and which of them share a base."""

from __future__ import annotations

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
