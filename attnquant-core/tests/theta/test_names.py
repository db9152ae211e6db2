"""Names: what is written parses back, and nothing else parses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnquant.theta.families import FAMILIES
from attnquant.theta.names import (
    FACTORS,
    BaseKey,
    FactorKey,
    ProjectionKey,
    base_name,
    factor_name,
    is_theta_name,
    parse_base,
    parse_factor,
    parse_projection,
    projection_name,
)
from core_support.tiny import weight_name

numbers = st.integers(0, 10**6)
families = st.sampled_from(FAMILIES)
groups = st.text(st.characters(exclude_characters="."), max_size=12)


@given(numbers, families)
def test_projection_names_round_trip(layer: int, family: str) -> None:
    name = projection_name(layer, family)
    assert weight_name(layer, family) == name
    assert ProjectionKey(layer, family) == parse_projection(name)
    assert not is_theta_name(name)


@given(numbers, families, st.sampled_from(FACTORS))
def test_factor_names_round_trip(layer: int, family: str, factor: str) -> None:
    name = factor_name(layer, family, factor)
    assert FactorKey(layer, family, factor) == parse_factor(name)
    assert parse_base(name) is None
    assert is_theta_name(name)


@given(numbers, groups, families)
def test_base_names_round_trip(band: int, group: str, family: str) -> None:
    name = base_name(band, group, family)
    assert BaseKey(band, group, family) == parse_base(name)
    assert parse_factor(name) is None
    assert is_theta_name(name)


def test_names_are_those_of_the_design() -> None:
    expected = ["W0.2.q_proj", "W0.2.sliding_attention.q_proj", "layers.7.up_proj.s"]
    found = [
        base_name(2, "", "q_proj"),
        base_name(2, "sliding_attention", "q_proj"),
        factor_name(7, "up_proj", "s"),
    ]
    assert expected == found


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.mlp.q_proj.weight",
        "layers.0.self_attn.up_proj.weight",
        "layers.00.self_attn.q_proj.weight",
        "layers.-1.self_attn.q_proj.weight",
        "layers.0.self_attn.q_proj.weight ",
        "layers.0.self_attn.q_proj.bias",
        "layers.0.self_attn.qkv_proj.weight",
        "layers.0.q_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "",
    ],
)
def test_other_names_are_no_projection(name: str) -> None:
    assert parse_projection(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "layers.0.q_proj.u",
        "layers.0.q_proj.W",
        "layers.0.self_attn.q_proj.U",
        "layers.01.q_proj.U",
        "layers.\N{ARABIC-INDIC DIGIT THREE}.q_proj.U",
        "layers.x.q_proj.U",
        "model.layers.0.q_proj.U",
        "W0.q_proj",
        "W0.01.q_proj",
        "W0.0.a.b.q_proj",
        "W0.0..q_proj",
        "W0.0.norm",
        "xW0.0.q_proj",
        "",
    ],
)
def test_other_names_are_no_theta_tensor(name: str) -> None:
    assert not is_theta_name(name)


@given(st.text("0123456789.W layers_projqkvUs", max_size=24))
def test_whatever_parses_is_spelled_as_it_would_be_written(name: str) -> None:
    if base := parse_base(name):
        assert name == base_name(*base)
    if factor := parse_factor(name):
        assert name == factor_name(*factor)
    if projection := parse_projection(name):
        assert name == projection_name(*projection)
