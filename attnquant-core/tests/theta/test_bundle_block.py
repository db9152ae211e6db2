"""The block: any damage to a field is a `BundleError` that says where it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from attnquant.errors import BundleError
from attnquant.theta.bundle import parse_block
from core_support.bundles import write_tiny_bundle

FIELDS = [
    "format_version",
    "method",
    "shared_blocks",
    "lora_rank",
    "ranks",
    "tie_families",
    "tied_projections",
    "layer_to_band",
    "groups",
    "shapes",
    "dtype",
    "kept",
    "source",
    "calibration",
    "error",
    "weighted_error",
    "created_by",
]


@pytest.fixture
def block(tmp_path: Path) -> dict[str, Any]:
    return write_tiny_bundle(tmp_path).info.to_json()


def damaged(block: Any, keys: Sequence[str | int], value: object) -> BundleError:
    part = block
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    return refused(block)


def refused(block: object) -> BundleError:
    with pytest.raises(BundleError) as caught:
        parse_block(block, "somewhere/config.json")
    error = caught.value
    assert error.subject.startswith("somewhere/config.json: attnquant")
    assert error.expected
    assert error.found
    assert "\n" not in str(error)
    return error


def test_the_block_is_whole_before_it_is_damaged(block: dict[str, Any]) -> None:
    assert sorted(FIELDS) == sorted(block)
    parse_block(block)


@pytest.mark.parametrize("block", [None, [], "x", 1, True])
def test_a_block_that_is_no_object_is_refused(block: object) -> None:
    assert refused(block).expected == "an object"


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_refused(block: dict[str, Any], field: str) -> None:
    del block[field]
    error = refused(block)
    assert field in str(error)


# A method is any text, and an absence of statistics is told by null.
@pytest.mark.parametrize(
    "field", [f for f in FIELDS if f not in {"method", "calibration"}]
)
@pytest.mark.parametrize("value", [None, "x", 2.5, [], [[]], -1, True])
def test_a_field_of_another_type_is_refused(
    block: dict[str, Any], field: str, value: object
) -> None:
    damaged(block, [field], value)


@pytest.mark.parametrize("version", [0, -1, 3, 1.0, "1", None, True, []])
def test_a_format_version_that_is_none_is_refused(
    block: dict[str, Any], version: object
) -> None:
    error = damaged(block, ["format_version"], version)
    assert error.subject.endswith("attnquant.format_version")
    assert error.expected == "a format from 1 to 2"


@pytest.mark.parametrize("value", [0, 1, 3, 5, -1])
def test_another_number_of_bands_than_there_are_is_refused(
    block: dict[str, Any], value: int
) -> None:
    error = damaged(block, ["shared_blocks"], value)
    assert error.subject.endswith("attnquant.shared_blocks")
    assert (error.expected, error.found) == ("2", str(value))


@pytest.mark.parametrize("value", [0, -1, 13])
def test_a_rank_out_of_bounds_is_refused(block: dict[str, Any], value: int) -> None:
    error = damaged(block, ["lora_rank"], value)
    assert error.subject.endswith("attnquant.lora_rank")
    assert error.found == str(value)


@pytest.mark.parametrize("rank", [-1, 4, 2.0, "3", None, True])
def test_a_rank_that_no_factor_can_have_is_refused(
    block: dict[str, Any], rank: object
) -> None:
    error = damaged(block, ["ranks", "W0.1.k_proj"], rank)
    assert error.subject.endswith("attnquant.ranks.W0.1.k_proj")
    assert error.expected == "a rank from 0 to 3"


def test_ranks_of_other_bases_than_there_are_are_refused(block: dict[str, Any]) -> None:
    block["ranks"]["W0.2.k_proj"] = block["ranks"].pop("W0.1.k_proj")
    assert refused(block).subject.endswith("attnquant.ranks")


@pytest.mark.parametrize(
    "bands",
    [[0, 2, 2, 2], [0, 1, 0, 1], [1, 1, 0, 0], [0, 1, 1], ["0", "0", "1", "1"], []],
)
def test_a_band_map_that_is_no_contiguous_split_is_refused(
    block: dict[str, Any], bands: list[int]
) -> None:
    error = damaged(block, ["layer_to_band", "k_proj"], bands)
    assert error.subject.endswith("attnquant.layer_to_band")


def test_bands_of_other_families_than_those_tied_are_refused(
    block: dict[str, Any],
) -> None:
    del block["layer_to_band"]["o_proj"]
    assert refused(block).subject.endswith("attnquant.layer_to_band")


def test_a_tie_mode_unlike_the_tied_projections_is_refused(
    block: dict[str, Any],
) -> None:
    error = damaged(block, ["tie_families"], "attn")
    assert error.subject.endswith("attnquant.tied_projections")


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["groups", "q_proj"], ["", ""]),
        (["groups", "q_proj"], []),
        (["groups", "q_proj"], None),
        (["groups", "q_proj", 0], "a.b"),
        (["groups", "q_proj", 0], "other"),
        (["groups", "q_proj", 0], {}),
        (["shapes", "q_proj"], {}),
        (["shapes", "q_proj", ""], [16]),
        (["shapes", "q_proj", ""], [0, 12]),
        (["shapes", "q_proj", ""], [-1, 12]),
        (["shapes", "q_proj", ""], ["a", 12]),
        (["shapes", "q_proj", ""], [float("inf"), 12]),
        (["shapes", "q_proj", ""], 16),
        (["dtype"], "float16"),
        (["kept", "norm.weight"], None),
        (["kept", "norm.weight"], {"dtype": "float32"}),
        (["kept", "norm.weight", "shape"], ["x"]),
        (["kept", "norm.weight", "shape"], None),
        (["source", "shards"], None),
        (["error", "q_proj"], "small"),
        (["error", "q_proj"], None),
        (["weighted_error", "q_proj"], None),
        (["calibration"], "statistics"),
        (["calibration"], {"sha256": "x"}),
        (["calibration"], {"sha256": "x", "texts": [{"name": "y"}]}),
    ],
)
def test_a_damaged_part_of_a_field_is_refused(
    block: dict[str, Any], keys: list[str | int], value: object
) -> None:
    damaged(block, keys, value)
