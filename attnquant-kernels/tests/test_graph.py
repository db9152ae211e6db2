"""What is refused while a graph is built, and that the op compiles for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue

from attnquant_kernels import mojo_package
from attnquant_kernels.graph import Projection, generated_linear

CPU = DeviceRef.CPU()
SHAPES = {"x": (2, 6), "w0": (4, 6), "u": (4, 3), "s": (3,), "v": (3, 6)}


def build(
    shapes: dict[str, tuple[int, ...]],
    dtypes: dict[str, DType] | None = None,
    devices: dict[str, DeviceRef] | None = None,
    without: str = "",
    extensions: Sequence[Path] = (),
) -> TensorValue:
    types = {
        name: TensorType(
            (dtypes or {}).get(name, DType.float32),
            shape,
            (devices or {}).get(name, CPU),
        )
        for name, shape in shapes.items()
    }
    with Graph(
        "g", input_types=list(types.values()), custom_extensions=extensions
    ) as graph:
        values = dict(zip(types, [value.tensor for value in graph.inputs], strict=True))
        x = values.pop("x")
        values.pop(without, None)
        y = generated_linear(x, [Projection(**values)])
        graph.output(y)
    return y


def test_the_result_has_the_rows_of_x_and_all_columns() -> None:
    y = build(SHAPES, extensions=[mojo_package()])
    assert (list(y.shape), y.dtype) == ([2, 4], DType.float32)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("x", (2, 3, 6), "x: expected 2 dimensions, found shape"),
        ("w0", (4, 5), "projections[0].w0: expected shape"),
        ("w0", (4,), "projections[0].w0: expected 2 dimensions"),
        ("u", (5, 3), "projections[0].u: expected shape"),
        ("u", (4, 2), "projections[0].u: expected shape"),
        ("s", (1, 3), "projections[0].s: expected 1 dimensions"),
        ("v", (3, 5), "projections[0].v: expected shape"),
        ("v", (2, 6), "projections[0].v: expected shape"),
    ],
)
def test_shapes_that_disagree_are_refused_by_name(
    name: str, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match="expected") as refused:
        build(SHAPES | {name: shape})
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ({"x": DType.bfloat16}, "x: expected float32, found bfloat16"),
        (
            {"w0": DType.float16},
            "projections[0].w0: expected float32 or bfloat16, found float16",
        ),
        (
            {"v": DType.bfloat16},
            "projections[0].v: expected float32, found bfloat16",
        ),
    ],
)
def test_wrong_dtypes_are_refused_by_name(
    dtypes: dict[str, DType], message: str
) -> None:
    with pytest.raises(TypeError) as refused:
        build(SHAPES, dtypes)
    assert str(refused.value) == message


def test_another_device_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"projections\[0\]\.s: expected on cpu"):
        build(SHAPES, devices={"s": DeviceRef.GPU()})


@pytest.mark.parametrize("name", ["u", "s", "v"])
def test_one_factor_missing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"projections\[0\]\.{name}: .* found None"):
        build(SHAPES, without=name)


def test_no_projection_is_refused() -> None:
    types = [TensorType(DType.float32, (2, 6), CPU)]
    with (
        Graph("g", input_types=types) as graph,
        pytest.raises(ValueError, match="projections: expected at least one"),
    ):
        generated_linear(graph.inputs[0].tensor, [])


def test_the_op_compiles_for_a_gpu_that_is_not_there() -> None:
    script = Path(__file__).with_name("compile_for_gpu.py")
    done = subprocess.run(
        [sys.executable, str(script), "cuda", "sm_90"],
        check=False,
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "compiled for sm_90\n"
