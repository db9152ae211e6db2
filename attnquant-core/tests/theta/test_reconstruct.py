"""Reconstruction: from names alone it is what it is with the layout, or an error."""

from __future__ import annotations

import numpy as np
import pytest

from attnquant.errors import CheckpointError
from attnquant.theta import (
    UNNAMED,
    ThetaLayout,
    decompose_standard_state_dict_to_attnquant,
    make_layout,
    reconstruct,
)
from attnquant.theta.decompose import projection_shapes
from core_support.tiny import (
    SHAPES,
    Weights,
    assert_same_bits,
    tiny_weights,
    weight_name,
)

decompose = decompose_standard_state_dict_to_attnquant
SMALL = dict.fromkeys(SHAPES, (3, 4))


def layout_of(weights: Weights, num_layers: int, blocks: int, **more) -> ThetaLayout:
    return make_layout(
        projection_shapes(weights),
        num_layers=num_layers,
        shared_blocks=blocks,
        lora_rank=2,
        **more,
    )


@pytest.mark.parametrize("tie", ["all", "attn"])
@pytest.mark.parametrize("num_layers", range(1, 13))
def test_bands_follow_from_names_alone(num_layers: int, tie: str) -> None:
    weights = tiny_weights(num_layers, shapes=SMALL)
    for blocks in range(1, num_layers + 1):
        theta = decompose(weights, 2, blocks, tie_families=tie)
        layout = layout_of(weights, num_layers, blocks, tie_families=tie)
        assert_same_bits(reconstruct(theta, layout), reconstruct(theta))


def test_the_order_of_names_does_not_matter() -> None:
    theta = decompose(tiny_weights(5), 3, 3)
    backwards = dict(reversed(theta.items()))
    assert_same_bits(reconstruct(theta), reconstruct(backwards))


def test_only_decomposed_projections_are_given_in_float32() -> None:
    weights = reconstruct(decompose(tiny_weights(4), 3, 2, tie_families="attn"))
    expected = {
        weight_name(layer, family)
        for layer in range(4)
        for family in SHAPES
        if "self_attn" in weight_name(layer, family)
    }
    assert expected == set(weights)
    assert {np.dtype(np.float32)} == {array.dtype for array in weights.values()}


def test_a_standard_state_dict_has_nothing_to_reconstruct() -> None:
    assert reconstruct(tiny_weights(2)) == {}


def by_parity(layer: int, family: str) -> str:
    return f"group{layer % 2}" if family == "q_proj" else UNNAMED


def test_a_grouped_model_is_reconstructed_with_its_layout() -> None:
    weights = tiny_weights(4)
    theta = decompose(weights, 12, 1, grouping=by_parity)
    found = reconstruct(theta, layout_of(weights, 4, 1, grouping=by_parity))
    exact = weights[weight_name(1, "q_proj")]
    mean = (exact + weights[weight_name(3, "q_proj")]) / 2
    np.testing.assert_allclose(theta["W0.0.group1.q_proj"], mean, atol=1e-6)
    np.testing.assert_allclose(found[weight_name(1, "q_proj")], exact, atol=1e-5)


def test_a_grouped_model_needs_its_layout() -> None:
    theta = decompose(tiny_weights(4), 3, 2, grouping=by_parity)
    with pytest.raises(CheckpointError) as caught:
        reconstruct(theta)
    assert caught.value.subject.endswith(".q_proj")
    assert "a layout" in caught.value.expected
    assert "layout=" in caught.value.hint


@pytest.mark.parametrize("with_layout", [True, False])
@pytest.mark.parametrize("layer", range(6))
@pytest.mark.parametrize("factor", ["U", "s", "V"])
def test_a_missing_factor_is_named(layer: int, factor: str, with_layout: bool) -> None:
    weights = tiny_weights(6)
    theta = decompose(weights, 3, 2)
    del theta[f"layers.{layer}.k_proj.{factor}"]
    with pytest.raises(CheckpointError) as caught:
        reconstruct(theta, layout_of(weights, 6, 2) if with_layout else None)
    assert caught.value.subject == f"layers.{layer}.k_proj.{factor}"
    assert caught.value.found == "no such tensor"


@pytest.mark.parametrize("layer", range(6))
def test_a_layer_without_any_factor_is_named(layer: int) -> None:
    weights = tiny_weights(6)
    theta = decompose(weights, 3, 2)
    for factor in "UsV":
        del theta[f"layers.{layer}.k_proj.{factor}"]
    with pytest.raises(CheckpointError) as caught:
        reconstruct(theta, layout_of(weights, 6, 2))
    assert caught.value.subject == f"layers.{layer}.k_proj.U"
    assert caught.value.expected == (
        f"a factor, since 3 layers share W0.{layer // 3}.k_proj"
    )


@pytest.mark.parametrize("layer", range(6))
def test_a_layer_without_any_factor_is_no_other_model(layer: int) -> None:
    theta = decompose(tiny_weights(6), 3, 2)
    for factor in "UsV":
        del theta[f"layers.{layer}.k_proj.{factor}"]
    with pytest.raises(CheckpointError, match="k_proj"):
        reconstruct(theta)


@pytest.mark.parametrize("with_layout", [True, False])
@pytest.mark.parametrize("band", [0, 1, 2])
def test_a_missing_base_is_named(band: int, with_layout: bool) -> None:
    weights = tiny_weights(6)
    theta = decompose(weights, 3, 3)
    del theta[f"W0.{band}.o_proj"]
    with pytest.raises(CheckpointError) as caught:
        reconstruct(theta, layout_of(weights, 6, 3) if with_layout else None)
    assert "o_proj" in str(caught.value)
