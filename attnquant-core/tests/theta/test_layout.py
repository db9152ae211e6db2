"""The layout: which theta tensors there are, and of which shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnquant.errors import CheckpointError, PluginError, SettingError
from attnquant.theta.families import ATTN_FAMILIES, FAMILIES, PerFamily
from attnquant.theta.grouping import UNNAMED, Group, NoBase
from attnquant.theta.layout import (
    Shape,
    ThetaLayout,
    check_positive_rank,
    check_rank_bound,
    make_layout,
)
from attnquant.theta.names import BaseKey, ProjectionKey
from core_support.oracle import bands_of
from core_support.tiny import FULL_RANK, SHAPES

Shapes = dict[ProjectionKey, Shape]


def shapes_of(num_layers: int) -> Shapes:
    return {
        ProjectionKey(layer, family): shape
        for family, shape in SHAPES.items()
        for layer in range(num_layers)
    }


def layout_of(
    *,
    num_layers: int = 4,
    blocks: object = 2,
    rank: object = 3,
    shapes: Shapes | None = None,
    tie: str = "all",
    grouping: Callable[[int, str], Group] | None = None,
) -> ThetaLayout:
    return make_layout(
        shapes or shapes_of(num_layers),
        num_layers=num_layers,
        shared_blocks=blocks,
        lora_rank=rank,
        tie_families=tie,
        **({"grouping": grouping} if grouping else {}),
    )


@given(st.integers(1, 12), st.data())
def test_each_projection_has_the_base_of_its_band(
    num_layers: int, data: st.DataObject
) -> None:
    blocks = data.draw(st.integers(1, num_layers))
    layout = layout_of(num_layers=num_layers, blocks=blocks)
    for band, layers in enumerate(bands_of(num_layers, blocks)):
        for family in FAMILIES:
            base = BaseKey(band, UNNAMED, family)
            assert tuple(layers) == layout.bases[base]
            assert {base} == {layout.base_of(layer, family) for layer in layers}


def test_theta_tensors_have_the_shapes_of_the_design() -> None:
    tensors = layout_of(num_layers=3, blocks=2).tensors()
    expected = {
        "W0.0.q_proj": (16, 12),
        "W0.1.q_proj": (16, 12),
        "layers.0.q_proj.U": (16, 3),
        "layers.0.q_proj.s": (3,),
        "layers.0.q_proj.V": (3, 12),
    }
    assert expected == {name: tensors[name] for name in expected}
    # A band of one layer has no residual: its base is that layer's own matrix.
    assert "layers.2.q_proj.U" not in tensors


def test_a_rank_above_a_matrix_full_rank_is_cut_there() -> None:
    layout = layout_of(rank=FULL_RANK)
    assert layout.ranks["k_proj"] == 8
    assert layout.ranks["q_proj"] == FULL_RANK
    assert layout.lora_rank == FULL_RANK


@pytest.mark.parametrize("rank", [None, 1, 300])
def test_rank_is_without_effect_at_passthrough(rank: int | None) -> None:
    layout = layout_of(blocks=4, rank=rank)
    assert layout.is_passthrough
    assert layout.lora_rank == 0
    assert set(layout.ranks.values()) == {0}
    assert len(layout.tensors()) == 4 * len(FAMILIES)


def test_only_the_tied_families_have_bases() -> None:
    layout = layout_of(tie="attn")
    assert layout.tied_projections == ATTN_FAMILIES
    assert set(ATTN_FAMILIES) == {base.family for base in layout.bases}
    assert layout.base_of(0, "up_proj") is None
    assert ProjectionKey(0, "up_proj") in layout.kept_dense


def by_parity(layer: int, family: str) -> Group:
    del family
    return "even" if layer % 2 == 0 else "odd"


def test_layers_of_different_groups_share_no_base() -> None:
    layout = layout_of(num_layers=6, grouping=by_parity)
    assert layout.bases[BaseKey(0, "even", "q_proj")] == (0, 2)
    assert layout.bases[BaseKey(0, "odd", "q_proj")] == (1,)
    assert "W0.0.even.q_proj" in layout.tensors()


def test_groups_of_one_band_may_differ_in_shape() -> None:
    shapes = shapes_of(4) | {ProjectionKey(i, "q_proj"): (32, 12) for i in (1, 3)}
    layout = layout_of(blocks=1, shapes=shapes, grouping=by_parity)
    assert layout.shapes[BaseKey(0, "odd", "q_proj")] == (32, 12)


def without_v_in_layer_1(layer: int, family: str) -> Group:
    return NoBase.ABSENT if (layer, family) == (1, "v_proj") else UNNAMED


def test_an_absent_projection_has_no_base_and_is_not_missed() -> None:
    shapes = shapes_of(4)
    del shapes[ProjectionKey(1, "v_proj")]
    layout = layout_of(shapes=shapes, grouping=without_v_in_layer_1)
    assert layout.base_of(1, "v_proj") is None
    assert layout.absent == {ProjectionKey(1, "v_proj")}


def test_an_absent_projection_that_is_there_is_refused() -> None:
    with pytest.raises(CheckpointError) as caught:
        layout_of(grouping=without_v_in_layer_1)
    assert caught.value.subject == "layers.1.self_attn.v_proj.weight"
    assert "no such tensor" in caught.value.expected
    assert caught.value.found == "one in the checkpoint"


def test_a_projection_left_dense_has_no_base() -> None:
    layout = layout_of(grouping=lambda i, _: NoBase.DENSE if i == 0 else UNNAMED)
    assert layout.base_of(0, "q_proj") is None
    assert layout.bases[BaseKey(0, UNNAMED, "q_proj")] == (1,)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_projection_is_named(family: str) -> None:
    shapes = shapes_of(4)
    del shapes[ProjectionKey(2, family)]
    with pytest.raises(CheckpointError) as caught:
        layout_of(shapes=shapes)
    assert f"layers.2.{'self_attn' if family in ATTN_FAMILIES else 'mlp'}.{family}" in (
        caught.value.subject
    )
    assert caught.value.expected == "a projection in each of 4 layers"
    assert caught.value.found == "no such tensor"


def test_a_layer_too_many_is_named() -> None:
    with pytest.raises(CheckpointError) as caught:
        layout_of(num_layers=3, shapes=shapes_of(4))
    assert caught.value.subject == "layers.3.self_attn.q_proj.weight"
    assert caught.value.expected == "layers 0 to 2"
    assert caught.value.found == "layer 3"


def test_a_shape_unlike_that_of_its_group_is_named() -> None:
    shapes = shapes_of(4) | {ProjectionKey(3, "up_proj"): (20, 13)}
    with pytest.raises(CheckpointError) as caught:
        layout_of(shapes=shapes)
    error = caught.value
    assert error.subject == "layers.3.mlp.up_proj.weight"
    assert "(20, 12)" in error.expected
    assert "layers.0.mlp.up_proj.weight" in error.expected
    assert error.found == "shape (20, 13)"


@pytest.mark.parametrize("shape", [(), (12,), (2, 3, 4), (0, 12)])
def test_a_projection_that_is_no_matrix_is_named(shape: Shape) -> None:
    shapes = shapes_of(4) | {ProjectionKey(0, "q_proj"): shape}
    with pytest.raises(CheckpointError) as caught:
        layout_of(shapes=shapes)
    assert caught.value.subject == "layers.0.self_attn.q_proj.weight"
    assert caught.value.expected == "a matrix (out, in)"
    assert caught.value.found == f"shape {shape}"


@pytest.mark.parametrize("rank", [0, -1, True, False, 2.0, "2", None])
def test_a_rank_that_is_no_positive_integer_is_refused(rank: object) -> None:
    with pytest.raises(SettingError) as caught:
        layout_of(rank=rank)
    error = caught.value
    assert error.subject == "lora_rank"
    assert error.expected == "a positive integer"
    assert error.found == ("nothing" if rank is None else repr(rank))


def test_a_rank_above_every_full_rank_is_refused() -> None:
    with pytest.raises(SettingError) as caught:
        layout_of(rank=FULL_RANK + 1)
    assert caught.value.subject == "lora_rank"
    assert caught.value.expected.startswith(f"at most {FULL_RANK}")
    assert caught.value.found == "13"


@pytest.mark.parametrize("blocks", [0, -1, 5, True, 1.5, "2", None])
def test_shared_blocks_out_of_bounds_are_refused(blocks: object) -> None:
    with pytest.raises(SettingError) as caught:
        layout_of(blocks=blocks)
    assert caught.value.subject == "shared_blocks"
    assert caught.value.found == repr(blocks)


def test_another_tie_mode_is_refused() -> None:
    with pytest.raises(SettingError, match="tie_families"):
        layout_of(tie="mlp")


@pytest.mark.parametrize("group", [None, 3, "a.b", b"x"])
def test_a_group_that_cannot_be_part_of_a_name_is_refused(group: Group) -> None:
    with pytest.raises(PluginError) as caught:
        layout_of(grouping=lambda _i, _f: group)
    assert caught.value.subject == "W0 group of layers.0.self_attn.q_proj.weight"
    assert "a name without dots" in caught.value.expected
    assert caught.value.found == repr(group)


@pytest.mark.parametrize("blocks", [2, 4])
def test_a_grouping_that_leaves_nothing_to_decompose_is_refused(blocks: int) -> None:
    with pytest.raises(PluginError) as caught:
        layout_of(blocks=blocks, grouping=lambda _i, _f: NoBase.DENSE)
    assert caught.value.subject == "W0 grouping key"
    assert caught.value.found == "none: all are dense or absent"


def test_ranks_are_checked_one_by_one_as_well() -> None:
    assert check_positive_rank(7) == 7
    assert check_rank_bound(3, {"a": (3, 9), "b": (2, 2)}) == 3
    with pytest.raises(SettingError, match="at most 3"):
        check_rank_bound(4, {"a": (3, 9), "b": (2, 2)})


def test_families_may_differ_in_bands_and_rank() -> None:
    layout = layout_of(
        blocks=PerFamily(4, {"q_proj": 2}), rank=PerFamily(3, {"k_proj": 1})
    )
    assert layout.blocks == dict.fromkeys(FAMILIES, 4) | {"q_proj": 2}
    assert (layout.shared_blocks, layout.lora_rank) == (4, 3)
    assert not layout.is_passthrough
    assert not layout.has_equal_bands
    assert layout.ranks == dict.fromkeys(FAMILIES, 0) | {"q_proj": 3}


def test_a_family_that_is_not_named_has_a_base_per_layer() -> None:
    layout = layout_of(blocks=PerFamily(None, {"v_proj": 1}), rank=2)
    assert layout.blocks == dict.fromkeys(FAMILIES, 4) | {"v_proj": 1}


def test_a_shared_family_needs_a_rank() -> None:
    with pytest.raises(SettingError) as caught:
        layout_of(blocks=2, rank=PerFamily(None, {"q_proj": 2}))
    assert caught.value.subject == "lora_rank"
    assert "k_proj" in caught.value.expected
    assert caught.value.found == "q_proj=2"


def test_a_family_with_a_rank_of_its_own_is_bound_by_its_own_matrices() -> None:
    layout_of(rank=PerFamily(3, {"k_proj": 8}))
    with pytest.raises(SettingError) as caught:
        layout_of(rank=PerFamily(3, {"k_proj": 9}))
    assert caught.value.expected.startswith("at most 8")


@pytest.mark.parametrize("field", ["blocks", "rank"])
def test_a_family_that_is_not_decomposed_cannot_be_named(field: str) -> None:
    with pytest.raises(SettingError) as caught:
        layout_of(tie="attn", **{field: PerFamily(2, {"up_proj": 2})})
    assert caught.value.found == "up_proj"


def test_ranks_may_differ_between_bases() -> None:
    layout = layout_of()
    ranks = {base: 2 if base.band else 20 for base in layout.bases}
    other = layout.with_ranks(ranks)
    assert other.rank_of(BaseKey(1, UNNAMED, "q_proj")) == 2
    # No more than the matrix can have.
    assert other.rank_of(BaseKey(0, UNNAMED, "k_proj")) == 8
    assert other.tensors()["layers.0.k_proj.U"] == (8, 8)
    assert other.lora_rank == FULL_RANK
    assert not other.has_equal_ranks
    assert layout.has_equal_ranks


@pytest.mark.parametrize("rank", [1, 3, 8, FULL_RANK])
def test_ranks_that_only_the_shapes_cut_are_equal(rank: int) -> None:
    assert layout_of(rank=rank).has_equal_ranks
