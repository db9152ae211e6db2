"""A tapped decoder's graph, traced and not compiled: what it returns or refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue
from max.nn.layer import LayerList, Module
from max.nn.layer.layer import _LAYER_HOOKS
from max.nn.linear import MLP, Linear
from max.nn.stacked_linear import StackedLinear

from attnquant.errors import ServingError
from attnquant.serving.taps import TAPPED_ROWS, TappedDecoder
from attnquant.theta.statistics import InputKey

CPU = DeviceRef.CPU()
HIDDEN, QUERIES, WIDE, LAYERS = 12, 16, 20, 2
X = TensorType(DType.float32, ["tokens", HIDDEN], CPU)


def linear(in_dim: int, out_dim: int) -> Linear:
    return Linear(in_dim, out_dim, DType.float32, CPU)


class Attention(Module):
    """Projections as MAX's attention has them: three stacked, one called."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = StackedLinear(
            in_dim=HIDDEN,
            out_dims=[QUERIES] * 3,
            names=["q_proj", "k_proj", "v_proj"],
            dtype=DType.float32,
            device=CPU,
        )
        self.o_proj = linear(QUERIES, HIDDEN)

    def __call__(self, x: TensorValue) -> TensorValue:
        return self.o_proj(self.qkv_proj(x)[:, :QUERIES])


class Called(Attention):
    """The same with projections that are called one by one."""

    def __call__(self, x: TensorValue) -> TensorValue:
        children = self.qkv_proj.sublayers
        q, k, v = (children[name](x) for name in ("q_proj", "k_proj", "v_proj"))
        return self.o_proj(q + k + v)


class TwoInputs(Attention):
    """A model of another kind: keys are made of something else than queries."""

    def __call__(self, x: TensorValue) -> TensorValue:
        children = self.qkv_proj.sublayers
        q, k, v = (children[name](x * 2) for name in ("q_proj", "k_proj", "v_proj"))
        return self.o_proj(q + k + v)


class ByWeight(Attention):
    """One that uses a weight directly, so that nobody sees its input."""

    def __call__(self, x: TensorValue) -> TensorValue:
        y = self.qkv_proj(x)[:, :QUERIES]
        return y @ self.o_proj.weight.T


class Block(Module):
    def __init__(self, attention: Module) -> None:
        super().__init__()
        self.self_attn = attention
        self.mlp = MLP(DType.float32, None, HIDDEN, WIDE, [CPU])

    def __call__(self, x: TensorValue) -> TensorValue:
        x = x + self.self_attn(x)
        return x + self.mlp(x)


class TextModel(Module):
    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        self.layers = LayerList([Block(attention()) for _ in range(LAYERS)])

    def __call__(self, x: TensorValue) -> TensorValue:
        for layer in self.layers:
            x = layer(x)
        return x


class Decoder(Module):
    def __init__(self, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.language_model = TextModel(attention)

    def __call__(self, x: Any) -> tuple[TensorValue, ...]:
        return (self.language_model(x.tensor),)


def traced(decoder: Module) -> tuple[TappedDecoder, Graph]:
    decoder.state_dict()  # which names each weight by its path
    tapped = TappedDecoder(decoder)
    return tapped, tapped.trace(TAPPED_ROWS, X)


def expected_keys() -> Iterator[InputKey]:
    for layer in range(LAYERS):
        for name in ("qkv", "o", "gate_up", "down"):
            yield InputKey(layer, name)


@pytest.mark.parametrize("attention", [Attention, Called])
def test_outputs_are_followed_by_every_input_in_order(
    attention: type[Attention],
) -> None:
    tapped, graph = traced(Decoder(attention))
    assert list(tapped.keys) == list(expected_keys())
    own, *taps = graph.output_types
    assert list(own.shape) == list(X.shape)
    widths = {"qkv": HIDDEN, "o": QUERIES, "gate_up": HIDDEN, "down": WIDE}
    assert [int(tap.shape[1]) for tap in taps] == [
        widths[key.input] for key in tapped.keys
    ]
    assert {str(tap.shape[0]) for tap in taps} == {"tapped_rows"}
    assert {tap.dtype for tap in taps} == {DType.float32}


def test_weights_keep_their_names() -> None:
    decoder = Decoder()
    names = sorted(decoder.raw_state_dict())
    tapped = TappedDecoder(decoder)
    assert tapped.raw_state_dict() == {}
    assert sorted(decoder.raw_state_dict()) == names
    assert "language_model.layers.1.self_attn.q_proj.weight" in names


def test_no_hook_is_left_behind() -> None:
    traced(Decoder())
    assert _LAYER_HOOKS == []
    with pytest.raises(ServingError):
        traced(Decoder(ByWeight))
    assert _LAYER_HOOKS == []


def test_a_projection_whose_input_nobody_sees_is_refused() -> None:
    with pytest.raises(ServingError, match=r"layers\.0\.self_attn\.o_proj") as caught:
        traced(Decoder(ByWeight))
    assert "one that this architecture uses in another way" in str(caught.value)


def test_projections_that_should_share_an_input_and_do_not_are_refused() -> None:
    with pytest.raises(ServingError, match="layer 0, input qkv: expected one tensor"):
        traced(Decoder(TwoInputs))
