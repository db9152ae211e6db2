"""Decomposition: what it refuses, and that the message names what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from attnquant.errors import CheckpointError, SettingError
from attnquant.theta import (
    decompose_standard_state_dict_to_attnquant,
    is_attnquant_theta_dict,
    relative_frobenius_error,
)
from core_support.tiny import BFLOAT16, FULL_RANK, tiny_weights, weight_name

decompose = decompose_standard_state_dict_to_attnquant
NAME = weight_name(2, "up_proj")


@pytest.mark.parametrize("rank", [0, -1, True, False, 2.0, "2"])
@pytest.mark.parametrize("blocks", [2, 4], ids=["shared", "passthrough"])
def test_a_rank_that_is_no_positive_integer_is_refused(rank: int, blocks: int) -> None:
    with pytest.raises(SettingError) as caught:
        decompose(tiny_weights(4), rank, blocks)
    assert caught.value.subject == "lora_rank"
    assert caught.value.expected == "a positive integer"
    assert caught.value.found == repr(rank)


def test_a_rank_is_needed_where_layers_share_a_base() -> None:
    with pytest.raises(SettingError, match="lora_rank: expected a positive integer"):
        decompose(tiny_weights(4), None, 2)


def test_a_rank_above_every_full_rank_is_refused() -> None:
    with pytest.raises(SettingError) as caught:
        decompose(tiny_weights(4), FULL_RANK + 1, 2)
    assert caught.value.expected.startswith("at most 12")
    assert caught.value.found == "13"


@pytest.mark.parametrize("blocks", [0, -3, 5, True, 2.0, "2", None])
def test_shared_blocks_out_of_bounds_are_refused(blocks: int) -> None:
    with pytest.raises(SettingError) as caught:
        decompose(tiny_weights(4), 3, blocks)
    assert caught.value.subject == "shared_blocks"
    assert caught.value.expected.startswith("an integer from 1 to 4")
    assert caught.value.found == repr(blocks)


def test_another_tie_mode_is_refused() -> None:
    with pytest.raises(SettingError, match="tie_families: expected one of all, attn"):
        decompose(tiny_weights(4), 3, 2, tie_families="mlp")


def test_another_storage_dtype_is_refused() -> None:
    with pytest.raises(SettingError, match="dtype: expected one of float32, bfloat16"):
        decompose(tiny_weights(4), 3, 2, dtype="float16")


@pytest.mark.parametrize("blocks", [2, 4], ids=["shared", "passthrough"])
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_projection_that_is_not_finite_is_named_with_the_place(
    value: float, dtype: np.dtype, blocks: int
) -> None:
    weights = tiny_weights(4, dtype=dtype)
    weights[NAME][3, 5] = value
    with pytest.raises(CheckpointError) as caught:
        decompose(weights, 3, blocks)
    error = caught.value
    assert error.subject == NAME
    assert error.expected == "finite values only"
    assert error.found == f"{value} at [3, 5]"
    assert str(error) == f"{NAME}: expected finite values only, found {error.found}"


def test_a_projection_of_integers_is_named() -> None:
    weights = tiny_weights(4) | {NAME: np.ones((20, 12), np.int8)}
    with pytest.raises(CheckpointError) as caught:
        decompose(weights, 3, 2)
    assert caught.value.subject == NAME
    assert caught.value.expected == "a floating-point dtype"
    assert caught.value.found == "int8"


def test_a_missing_projection_is_named() -> None:
    weights = tiny_weights(4)
    del weights[NAME]
    with pytest.raises(CheckpointError) as caught:
        decompose(weights, 3, 2)
    assert caught.value.subject == NAME
    assert caught.value.found == "no such tensor"


def test_a_missing_last_layer_is_seen_where_the_number_of_layers_is_given() -> None:
    with pytest.raises(CheckpointError) as caught:
        decompose(tiny_weights(3), 3, 2, num_layers=4)
    assert caught.value.subject == weight_name(3, "q_proj")


def test_a_projection_of_the_wrong_shape_is_named() -> None:
    weights = tiny_weights(4)
    weights[NAME] = weights[NAME].T
    with pytest.raises(CheckpointError) as caught:
        decompose(weights, 3, 1)
    error = caught.value
    assert error.subject == NAME
    assert "(20, 12)" in error.expected
    assert error.found == "shape (12, 20)"


def test_a_state_dict_that_is_decomposed_already_is_refused() -> None:
    theta = decompose(tiny_weights(4), 3, 2)
    with pytest.raises(CheckpointError, match="decomposed already"):
        decompose(theta, 3, 2)


def test_names_that_are_not_canonical_are_refused_with_a_hint() -> None:
    named = {"model." + name: array for name, array in tiny_weights(2).items()}
    with pytest.raises(CheckpointError) as caught:
        decompose(named, 3, 1)
    assert "layers.0.self_attn.q_proj.weight" in caught.value.expected
    assert "model.embed_tokens.weight" in caught.value.found
    assert "prefix map" in caught.value.hint


def test_an_empty_state_dict_is_refused() -> None:
    with pytest.raises(CheckpointError, match="found none among no tensors"):
        decompose({}, 3, 1)


def test_the_input_is_left_as_it_was() -> None:
    weights = tiny_weights(4)
    decompose(weights, 3, 2)
    assert all((weights[n] == w).all() for n, w in tiny_weights(4).items())


def test_theta_tensors_are_told_from_standard_ones() -> None:
    assert not is_attnquant_theta_dict(tiny_weights(2))
    assert is_attnquant_theta_dict(decompose(tiny_weights(2), 3, 1))
    assert is_attnquant_theta_dict(decompose(tiny_weights(2), None, 2))
    assert not is_attnquant_theta_dict({})


def test_the_relative_error_is_taken_over_all_names() -> None:
    exact = {"a": np.array([3.0, 0.0]), "b": np.array([0.0, 4.0]), "c": np.ones(9)}
    found = {"a": np.array([3.0, 3.0]), "b": np.array([4.0, 4.0])}
    assert relative_frobenius_error(exact, found) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("exact", "found", "expected"), [(0.0, 0.0, 0.0), (0.0, 1.0, np.inf), (2, 1, 0.5)]
)
def test_the_relative_error_of_arrays(
    exact: float, found: float, expected: float
) -> None:
    assert expected == relative_frobenius_error(np.full(3, exact), np.full(3, found))


def test_the_relative_error_needs_equal_names_shapes_and_kinds() -> None:
    with pytest.raises(KeyError, match="b"):
        relative_frobenius_error({"a": np.ones(2)}, {"b": np.ones(2)})
    with pytest.raises(ValueError, match=r"a: shapes \(2,\) and \(3,\) differ"):
        relative_frobenius_error({"a": np.ones(2)}, {"a": np.ones(3)})
    with pytest.raises(TypeError, match="two arrays or two mappings"):
        relative_frobenius_error({"a": np.ones(2)}, np.ones(2))
