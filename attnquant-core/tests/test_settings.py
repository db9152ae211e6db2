"""Settings: each variable validated, and none able to contradict a bundle."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from attnquant.errors import SettingError
from attnquant.settings import (
    BLOCKS,
    DISABLE,
    FORMULATION,
    FORMULATIONS,
    PIN,
    PLUGINS,
    RANK,
    TIE,
    VARIABLES,
    Settings,
    Variable,
    resolve_settings,
    warn_unknown_variables,
)
from attnquant.theta.bundle import BundleInfo
from attnquant.theta.families import ATTN_FAMILIES, FAMILIES, PerFamily
from core_support.bundles import write_tiny_bundle


@pytest.fixture
def bundle(tmp_path: Path) -> BundleInfo:
    """Give the block of a bundle with L=4, G=2, r=3, tied in the attention only."""
    return write_tiny_bundle(tmp_path, tie_families="attn").info


@pytest.fixture
def passthrough(tmp_path: Path) -> BundleInfo:
    return write_tiny_bundle(tmp_path, blocks=4, rank=None).info


def test_a_raw_checkpoint_is_passed_through_unless_asked_otherwise() -> None:
    settings = resolve_settings(18, environ={})
    assert (settings.shared_blocks, settings.lora_rank) == (18, 0)
    assert settings.tied_projections == FAMILIES
    assert settings.formulation == FORMULATIONS[0] == "gemm"
    assert settings.origin == "no ATTNQUANT_BLOCKS set: passthrough"


def test_the_environment_says_how_to_decompose() -> None:
    environ = {
        "ATTNQUANT_BLOCKS": "9",
        "ATTNQUANT_RANK": "64",
        "ATTNQUANT_TIE": "attn",
        "ATTNQUANT_FORMULATION": "dense",
    }
    settings = resolve_settings(18, environ=environ)
    expected = Settings(9, 64, "attn", "dense", "ATTNQUANT_BLOCKS", 64)
    assert expected == settings
    assert settings.tied_projections == ATTN_FAMILIES


def test_the_process_environment_is_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATTNQUANT_BLOCKS", "6")
    monkeypatch.setenv("ATTNQUANT_RANK", "4")
    assert resolve_settings(18).shared_blocks == 6


@pytest.mark.parametrize("rank", ["1", "256", "100000"])
def test_rank_is_without_effect_at_passthrough(rank: str) -> None:
    environ = {"ATTNQUANT_BLOCKS": "18", "ATTNQUANT_RANK": rank}
    assert resolve_settings(18, environ=environ).lora_rank == 0


def test_rank_is_needed_below_passthrough() -> None:
    with pytest.raises(SettingError) as caught:
        resolve_settings(18, environ={"ATTNQUANT_BLOCKS": "9"})
    error = caught.value
    assert error.subject == "ATTNQUANT_RANK"
    assert "ATTNQUANT_BLOCKS=9 is below the 18 layers" in error.expected
    assert error.found == "nothing (not set)"


NOT_POSITIVE = ["0", "-1", "", " ", "two", "2.0", "1e1", "True", "0x10", "nan"]


@pytest.mark.parametrize("variable", [RANK, BLOCKS], ids=lambda v: v.name)
@pytest.mark.parametrize("text", NOT_POSITIVE)
def test_a_number_that_is_no_positive_integer_is_refused(
    variable: Variable, text: str
) -> None:
    with pytest.raises(SettingError) as caught:
        resolve_settings(18, environ={variable.name: text})
    error = caught.value
    assert error.subject == variable.name
    assert error.expected == variable.range
    assert error.found == repr(text)
    assert str(error) == f"{variable.name}: expected {variable.range}, found {text!r}"


@pytest.mark.parametrize("blocks", ["19", "1000000"])
def test_blocks_above_the_number_of_layers_are_refused(blocks: str) -> None:
    with pytest.raises(SettingError) as caught:
        resolve_settings(18, environ={"ATTNQUANT_BLOCKS": blocks})
    error = caught.value
    assert error.subject == "ATTNQUANT_BLOCKS"
    assert error.expected == "an integer from 1 to 18 (the number of layers)"
    assert error.found == blocks


@pytest.mark.parametrize("variable", [TIE, FORMULATION], ids=lambda v: v.name)
@pytest.mark.parametrize("text", ["", "ALL", "mlp", "attn,all", "fast"])
def test_another_word_than_those_allowed_is_refused(
    variable: Variable, text: str
) -> None:
    with pytest.raises(SettingError) as caught:
        resolve_settings(18, environ={variable.name: text})
    error = caught.value
    assert error.subject == variable.name
    assert error.expected.startswith("one of ")
    assert error.found == repr(text)


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_each_formulation_can_be_asked_for(formulation: str) -> None:
    environ = {"ATTNQUANT_FORMULATION": formulation}
    assert formulation == resolve_settings(18, environ=environ).formulation


def test_a_bundle_says_how_it_was_made(bundle: BundleInfo) -> None:
    expected = Settings(2, 3, "attn", "gemm", "the bundle")
    assert expected == resolve_settings(4, bundle, {})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ATTNQUANT_BLOCKS", "2"),
        ("ATTNQUANT_RANK", "3"),
        ("ATTNQUANT_TIE", "attn"),
    ],
)
def test_the_environment_may_repeat_what_the_bundle_says(
    bundle: BundleInfo, name: str, text: str
) -> None:
    expected = resolve_settings(4, bundle, {})
    assert expected == resolve_settings(4, bundle, {name: text})


@pytest.mark.parametrize(
    ("name", "text", "bundled"),
    [
        ("ATTNQUANT_BLOCKS", "4", "2"),
        ("ATTNQUANT_BLOCKS", "1", "2"),
        ("ATTNQUANT_RANK", "4", "3"),
        ("ATTNQUANT_TIE", "all", "attn"),
    ],
)
def test_the_environment_may_not_contradict_the_bundle(
    bundle: BundleInfo, name: str, text: str, bundled: str
) -> None:
    with pytest.raises(SettingError) as caught:
        resolve_settings(4, bundle, {name: text})
    error = caught.value
    assert error.subject == name
    assert error.expected.startswith(f"{bundled} (what the bundle was made with)")
    assert error.found == text
    assert f"Unset {name}" in error.hint


@pytest.mark.parametrize("formulation", FORMULATIONS)
def test_a_bundle_is_served_in_any_formulation(
    bundle: BundleInfo, formulation: str
) -> None:
    environ = {"ATTNQUANT_FORMULATION": formulation}
    assert formulation == resolve_settings(4, bundle, environ).formulation


@pytest.mark.parametrize("rank", ["1", "256"])
def test_rank_is_irrelevant_to_a_passthrough_bundle(
    passthrough: BundleInfo, rank: str
) -> None:
    assert resolve_settings(4, passthrough, {"ATTNQUANT_RANK": rank}).lora_rank == 0


@pytest.mark.parametrize("variable", [RANK, BLOCKS, TIE, FORMULATION])
def test_a_malformed_variable_is_refused_with_a_bundle_too(
    passthrough: BundleInfo, variable: Variable
) -> None:
    with pytest.raises(SettingError) as caught:
        resolve_settings(4, passthrough, {variable.name: "-1"})
    assert caught.value.subject == variable.name


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ATTNQUANT_RANKS", "; did you mean ATTNQUANT_RANK?"),
        ("ATTNQUANT_BLOCK", "; did you mean ATTNQUANT_BLOCKS?"),
        ("ATTNQUANT_FORMULATON", "; did you mean ATTNQUANT_FORMULATION?"),
        ("ATTNQUANT_VERBOSITY", ""),
        ("ATTNQUANT_", ""),
    ],
)
def test_an_unknown_variable_is_warned_of_with_a_close_match(
    name: str, hint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "attnquant"):
        resolve_settings(18, environ={name: "1"})
    assert [f"{name} is set, but means nothing{hint}"] == caplog.messages


def test_known_and_foreign_variables_are_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_unknown_variables({v.name: "x" for v in VARIABLES} | {"PATH": "/bin"})
    assert caplog.messages == []


@pytest.mark.parametrize("variable", [PLUGINS, DISABLE], ids=lambda v: v.name)
@pytest.mark.parametrize(
    ("text", "expected"),
    [("a", ("a",)), (" a , b,", ("a", "b"))],
)
def test_names_are_separated_by_commas(
    variable: Variable, text: str, expected: tuple[str, ...]
) -> None:
    assert expected == variable.read({variable.name: text})


def test_pins_are_pairs() -> None:
    expected = {"A": "attnquant-a", "B": "b"}
    assert expected == PIN.read({PIN.name: "A=attnquant-a, B = b"})


@pytest.mark.parametrize("text", ["A", "A=", "=a", "A=a,B"])
def test_a_malformed_pin_is_refused(text: str) -> None:
    with pytest.raises(SettingError) as caught:
        PIN.read({PIN.name: text})
    assert caught.value.subject == "ATTNQUANT_PIN"
    assert "architecture=distribution" in caught.value.expected
    assert caught.value.found == repr(text)


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda v: v.name)
def test_a_variable_says_what_it_is(variable: Variable) -> None:
    assert variable.name.startswith("ATTNQUANT_")
    assert all([variable.range, variable.default, variable.effect])
    assert variable.read({}) is None


@pytest.fixture
def uneven(tmp_path: Path) -> BundleInfo:
    """Give the block of a bundle whose families differ in bands and ranks."""
    return write_tiny_bundle(
        tmp_path,
        blocks=PerFamily(4, {"q_proj": 2, "k_proj": 1}),
        rank=PerFamily(3, {"k_proj": 2}),
    ).info


@pytest.mark.parametrize("number", ["1", "2", "3", "4"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ATTNQUANT_BLOCKS", "bands by family: q_proj=2,k_proj=1,v_proj=4,o_proj=4,"),
        ("ATTNQUANT_RANK", "ranks by base: q_proj=3,k_proj=2 (what"),
    ],
)
def test_no_number_repeats_what_differs_by_family(
    uneven: BundleInfo, name: str, expected: str, number: str
) -> None:
    with pytest.raises(SettingError) as caught:
        resolve_settings(4, uneven, {name: number})
    assert caught.value.subject == name
    assert caught.value.expected.startswith(expected)


def test_a_bundle_that_differs_by_family_says_how_it_was_made(
    uneven: BundleInfo,
) -> None:
    found = resolve_settings(4, uneven, {})
    assert (found.shared_blocks, found.lora_rank, found.tie_families) == (4, 3, "all")
