"""The layers before any graph is built: the weights they declare, what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from max.dtype import DType
from max.graph import DeviceRef
from max.graph.weights import WeightData
from max.nn.layer import Module
from max.nn.linear import Linear

from attnquant.errors import CheckpointError, ServingError
from attnquant.serving.linear import (
    AttnQuantLinear,
    StackedProjection,
    attnquant_linears,
)
from attnquant.serving.pipeline_model import graph_name, load_weights
from attnquant.serving.projections import ProjectionMaker
from attnquant.serving.w0 import W0, SharedBase
from attnquant.theta import FAMILIES, ThetaLayout, make_layout
from attnquant.theta.grouping import Group
from attnquant.theta.names import BaseKey, ProjectionKey

CPU = DeviceRef.CPU()
OUT, IN = 12, 20
DIMS = dict.fromkeys(FAMILIES, (OUT, IN))


def kinds(layer: int, family: str) -> Group:
    return "even" if layer % 2 == 0 and family == "q_proj" else "other"


def layout_of(rank: int = 4, blocks: int = 2, *, grouped: bool = False) -> ThetaLayout:
    return make_layout(
        {ProjectionKey(i, family): DIMS[family] for i in range(4) for family in DIMS},
        num_layers=4,
        shared_blocks=blocks,
        lora_rank=rank,
        **({"grouping": kinds} if grouped else {}),
    )


def maker_of(
    layout: ThetaLayout, formulation: str = "gemm", device: DeviceRef = CPU
) -> ProjectionMaker:
    return ProjectionMaker(layout, formulation, DType.float32, device)


class Holder(Module):
    """A decoder in miniature: bases, and the projections of one layer."""

    def __init__(self, layout: ThetaLayout) -> None:
        super().__init__()
        self.W0 = W0(layout, DType.float32, CPU)
        made = maker_of(layout).make(0, DIMS)
        self.qkv = StackedProjection(
            ("q_proj", "k_proj"), [made["q_proj"], made["k_proj"]]
        )

    def __call__(self) -> None:
        pytest.fail("this module computes nothing")


def test_a_projection_declares_its_factors_and_no_weight_of_its_own() -> None:
    made = maker_of(layout_of()).make(0, DIMS, has_bias=True)["q_proj"]
    assert isinstance(made, AttnQuantLinear)
    found = {name: tuple(w.shape) for name, w in made.raw_state_dict().items()}
    assert found == {"U": (OUT, 4), "s": (4,), "V": (4, IN), "bias": (OUT,)}
    with pytest.raises(TypeError, match="no single weight"):
        made.weight  # noqa: B018


def test_dense_makes_stock_linears() -> None:
    made = maker_of(layout_of(), "dense").make(0, DIMS)
    assert {type(linear) for linear in made.values()} == {Linear}


def test_bases_are_named_as_in_a_bundle_and_belong_to_the_model() -> None:
    names = set(Holder(layout_of()).raw_state_dict())
    assert {f"W0.{band}.{family}" for band in range(2) for family in FAMILIES} <= names
    assert {"qkv.q_proj.U", "q_proj.U"} & names == {"q_proj.U"}


def test_grouped_bases_have_a_level_more() -> None:
    w0 = W0(layout_of(grouped=True), DType.float32, CPU)
    assert {"0.even.q_proj", "0.other.q_proj"} <= set(w0.raw_state_dict())
    base = w0.base(BaseKey(1, "other", "q_proj"))
    assert isinstance(base, SharedBase)
    assert w0[1]["other"]["q_proj"] is base


def test_a_forward_without_a_lent_base_says_what_to_call() -> None:
    (first, *_) = attnquant_linears(Holder(layout_of()))
    with pytest.raises(RuntimeError, match=r"q_proj: call set_w0\(\)"):
        first(None)


def test_a_layer_and_a_checkpoint_of_other_dimensions_are_refused() -> None:
    with pytest.raises(CheckpointError) as caught:
        maker_of(layout_of()).make(1, {"o_proj": (OUT, IN + 1)})
    assert caught.value.subject == "layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(("rank", "is_refused"), [(4, True), (8, False), (12, True)])
def test_a_rank_that_gpus_cannot_compile_is_refused_there(
    rank: int, is_refused: bool
) -> None:
    on_gpu = maker_of(layout_of(rank), device=DeviceRef.GPU())
    if not is_refused:
        assert on_gpu.make(0, DIMS)
        return
    with pytest.raises(ServingError, match="a multiple of 8 on a GPU"):
        on_gpu.make(0, DIMS)
    assert maker_of(layout_of(rank)).make(0, DIMS)


def weights_of(module: Module) -> dict[str, WeightData]:
    return {
        name: WeightData.from_numpy(np.zeros(tuple(map(int, w.shape)), "f4"), name)
        for name, w in module.raw_state_dict().items()
    }


def test_weights_too_few_or_too_many_are_named() -> None:
    holder = Holder(layout_of())
    weights = weights_of(holder)
    load_weights(holder, weights)
    with pytest.raises(CheckpointError) as caught:
        load_weights(holder, {k: w for k, w in weights.items() if k != "q_proj.s"})
    assert caught.value.subject == "q_proj.s"
    with pytest.raises(CheckpointError) as caught:
        load_weights(holder, {**weights, "surprise": weights["q_proj.s"]})
    assert caught.value.subject == "surprise"


def test_a_graphs_name_follows_from_its_weights_alone() -> None:
    same = graph_name(Holder(layout_of())), graph_name(Holder(layout_of()))
    assert same[0] == same[1]
    others = {
        graph_name(Holder(layout_of(rank, blocks)))
        for rank, blocks in ((4, 2), (5, 2), (4, 1))
    }
    assert len(others) == 3
