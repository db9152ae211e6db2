"""Families: seven, of which a tie mode takes all or those of the attention."""

from __future__ import annotations

import pytest

from attnquant.errors import SettingError
from attnquant.theta.families import (
    ATTN_FAMILIES,
    FAMILIES,
    MLP_FAMILIES,
    TIE_MODES,
    PerFamily,
    module_of,
    parse_per_family,
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("64", PerFamily(64)),
        ("q_proj=64", PerFamily(None, {"q_proj": 64})),
        (" 18 , q_proj = 9,k_proj=8", PerFamily(18, {"q_proj": 9, "k_proj": 8})),
        ("-1", PerFamily(-1)),
    ],
)
def test_numbers_by_family_are_read(text: str, expected: PerFamily) -> None:
    assert expected == parse_per_family(text)
    assert expected == parse_per_family(str(expected))


@pytest.mark.parametrize(
    "text",
    ["", "x", "1,2", "q_proj", "q_proj=", "q=3", "q_proj=1,q_proj=2", "=3", "1.5"],
)
def test_what_is_no_number_by_family_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_per_family(text)


def test_a_named_family_has_its_own_number() -> None:
    values = parse_per_family("3,q_proj=5")
    assert [values.of("q_proj"), values.of("up_proj")] == [5, 3]
    assert parse_per_family("q_proj=5").of("up_proj") is None
