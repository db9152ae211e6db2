"""Families: seven, of which a tie mode takes all or those of the attention."""

from __future__ import annotations

import pytest

from attnquant.errors import SettingError
from attnquant.theta.families import (
    ATTN_FAMILIES,
    FAMILIES,
    MLP_FAMILIES,
    TIE_MODES,
    module_of,
    tied_families_for,
)
from core_support.tiny import MODULES, SHAPES


def test_there_are_seven_families() -> None:
    assert tuple(SHAPES) == FAMILIES


def test_attention_and_mlp_families_make_up_all() -> None:
    assert FAMILIES == ATTN_FAMILIES + MLP_FAMILIES


def test_all_is_the_first_tie_mode() -> None:
    assert TIE_MODES == ("all", "attn")


@pytest.mark.parametrize(
    ("mode", "expected"), [("all", FAMILIES), ("attn", ATTN_FAMILIES)]
)
def test_a_tie_mode_gives_its_families(mode: str, expected: tuple[str, ...]) -> None:
    assert expected == tied_families_for(mode)


@pytest.mark.parametrize("mode", ["", "ALL", "mlp", "attn ", None, 1, ["all"]])
def test_another_tie_mode_is_refused(mode: str) -> None:
    with pytest.raises(SettingError) as caught:
        tied_families_for(mode)
    error = caught.value
    assert error.subject == "tie_families"
    assert error.expected == "one of all, attn"
    assert error.found == repr(mode)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_in_its_module(family: str) -> None:
    assert MODULES[family] == module_of(family)
