"""A decoder's graph that also returns what each projection is applied to.

Which tensors those are is found while the graph is traced, from MAX's layer hooks:
every layer that is called reports its input, so that no model has to be written for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue, Value, ops
from max.nn.layer import Layer, Module
from max.nn.layer.layer import add_layer_hook, clear_hooks
from max.nn.linear import MLP
from max.nn.stacked_linear import StackedLinear

from attnquant.errors import ServingError
from attnquant.serving.weight_adapter import GRAPH_PREFIX
from attnquant.theta.names import ProjectionKey, parse_projection, projection_name
from attnquant.theta.statistics import INPUTS, InputKey, input_of

TAPPED_ROWS = TensorType(DType.int64, [1], DeviceRef.CPU())
"""The graph input that says how many rows of each tapped tensor to return."""


class TappedDecoder(Module):
    """A decoder whose outputs are followed by its projections' inputs.

    The inputs come in float32, in the order of `keys`, each as ``[rows, in]``. How many
    rows is the graph's first input, so that whoever wants logits only asks for none:
    one graph serves both, and is compiled once.
    """

    def __init__(self, decoder: Module) -> None:
        """Look at the decoder's modules; its weights keep their names."""
        super().__init__()
        # In a tuple, since as a child it would lend its weights another prefix.
        self._decoder = (decoder,)
        self._projections = _find_projections(decoder)
        self._fused = _find_fused(decoder, self._projections)
        self.keys = input_keys(self._projections.values())

    def __call__(
        self, tapped_rows: Value[Any], *inputs: Value[Any]
    ) -> tuple[TensorValue, ...]:
        """Return the decoder's outputs, then the tapped tensors.

        Raises:
            ServingError: If a projection's input cannot be told.
        """
        with self._recording() as recorded:
            outputs = self._decoder[0](*inputs)
        rows = tapped_rows.tensor[0]
        taps = [
            ops.slice_tensor(
                ops.cast(tensor, DType.float32),
                [(slice(0, rows), "tapped_rows"), slice(None)],
            )
            for tensor in self._by_input(recorded)
        ]
        return (*outputs, *taps)

    @contextmanager
    def _recording(self) -> Iterator[dict[ProjectionKey, TensorValue]]:
        recorded: dict[ProjectionKey, TensorValue] = {}

        def record(
            layer: Layer, args: tuple[Any, ...], _kwargs: object, _outputs: object
        ) -> None:
            if (key := self._projections.get(id(layer))) is not None:
                recorded[key] = args[0]
            # Called after its children: those that it did call have been recorded.
            for key in self._fused.get(id(layer), ()):
                recorded.setdefault(key, args[0])

        add_layer_hook(record)
        try:
            yield recorded
        finally:
            clear_hooks()

    def _by_input(
        self, recorded: dict[ProjectionKey, TensorValue]
    ) -> Iterator[TensorValue]:
        for wanted in self.keys:
            tensors = []
            for key in self._projections.values():
                if (key.layer, input_of(key.family)) == wanted:
                    if key not in recorded:
                        raise ServingError(
                            projection_name(*key),
                            expected="a projection that is called with its input, by"
                            " MAX's StackedLinear or MLP or by itself",
                            found="one that this architecture uses in another way",
                        )
                    tensors.append(recorded[key])
            if any(tensor is not tensors[0] for tensor in tensors[1:]):
                raise ServingError(
                    f"layer {wanted.layer}, input {wanted.input}",
                    expected="one tensor that all its projections are applied to",
                    found="several",
                )
            yield tensors[0]


def input_keys(projections: Iterable[ProjectionKey]) -> tuple[InputKey, ...]:
    """Return the inputs of some projections, layer by layer, in order of use."""
    keys = {InputKey(key.layer, input_of(key.family)) for key in projections}
    return tuple(sorted(keys, key=lambda key: (key.layer, INPUTS.index(key.input))))


def _find_projections(decoder: Module) -> dict[int, ProjectionKey]:
    found = {}
    for prefix, module in decoder.named_modules():
        key = parse_projection(prefix.removeprefix(GRAPH_PREFIX) + "weight")
        if key is not None:
            found[id(module)] = key
    return found


def _find_fused(
    decoder: Module, projections: dict[int, ProjectionKey]
) -> dict[int, Sequence[ProjectionKey]]:
    """Return the modules that may use projections of theirs without calling them.

    Both concatenate the weights of projections that are applied to the module's own
    input. What they do call (an MLP its `down_proj`) reports for itself.
    """
    return {
        id(module): [
            projections[id(child)]
            for child in module.sublayers.values()
            if id(child) in projections
        ]
        for _, module in decoder.named_modules()
        if isinstance(module, StackedLinear | MLP)
    }
