"""Bands: contiguous, of sizes that differ by at most one, and covering every layer."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnquant.errors import SettingError
from attnquant.theta.bands import band_index, check_shared_blocks, layer_to_band
from core_support.oracle import bands_of


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int]:
    """Draw L and a G that goes with it."""
    num_layers = draw(st.integers(1, 150))
    return num_layers, draw(st.integers(1, num_layers))


@given(splits())
def test_bands_are_contiguous_and_all_are_used(split: tuple[int, int]) -> None:
    bands = layer_to_band(*split)
    assert bands[0] == 0
    assert bands[-1] == split[1] - 1
    assert {after - before for before, after in pairwise(bands)} <= {0, 1}


@given(splits())
def test_band_sizes_differ_by_at_most_one(split: tuple[int, int]) -> None:
    num_layers, shared_blocks = split
    bands = layer_to_band(*split)
    sizes = [bands.count(band) for band in range(shared_blocks)]
    assert sum(sizes) == num_layers
    assert max(sizes) - min(sizes) <= 1


@given(splits())
def test_bands_are_those_of_the_oracle(split: tuple[int, int]) -> None:
    expected = [band for band, layers in enumerate(bands_of(*split)) for _ in layers]
    assert expected == list(layer_to_band(*split))


@given(splits(), st.data())
def test_a_layers_band_is_the_formula_of_the_design(
    split: tuple[int, int], data: st.DataObject
) -> None:
    num_layers, shared_blocks = split
    layer = data.draw(st.integers(0, num_layers - 1))
    expected = layer * shared_blocks // num_layers
    assert expected == band_index(layer, num_layers, shared_blocks)


def test_each_layer_is_a_band_at_passthrough() -> None:
    assert tuple(range(18)) == layer_to_band(18, 18)


def test_one_band_holds_all_layers() -> None:
    assert layer_to_band(18, 1) == (0,) * 18


def test_an_uneven_split_is_as_equal_as_can_be() -> None:
    assert layer_to_band(7, 3) == (0, 0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize("blocks", [0, -1, 7, True, False, 2.0, "2", None])
def test_shared_blocks_out_of_bounds_are_refused(blocks: object) -> None:
    with pytest.raises(SettingError) as caught:
        check_shared_blocks(blocks, 6)
    error = caught.value
    assert error.subject == "shared_blocks"
    assert error.expected == "an integer from 1 to 6 (the number of layers)"
    assert error.found == repr(blocks)
    assert str(error) == f"shared_blocks: expected {error.expected}, found {blocks!r}"


@pytest.mark.parametrize("blocks", [1, 3, 6])
def test_shared_blocks_in_bounds_are_handed_back(blocks: int) -> None:
    assert blocks == check_shared_blocks(blocks, 6)


@pytest.mark.parametrize("layer", [-1, 6])
def test_a_layer_that_is_not_there_has_no_band(layer: int) -> None:
    with pytest.raises(IndexError, match=f"layer {layer} of a model with 6 layers"):
        band_index(layer, 6, 2)


@pytest.mark.parametrize("blocks", [0, 7, True])
def test_a_layers_band_needs_valid_shared_blocks(blocks: int) -> None:
    with pytest.raises(SettingError):
        band_index(0, 6, blocks)
