"""The ops of this package in a MAX graph; the one module here that imports MAX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from max.dtype import DType
from max.graph import Dim, StaticDim, TensorType, TensorValue, Weight, ops

GENERATED_LINEAR = "attnquant_generated_linear"
"""The op's name; a graph that holds it needs `mojo_package()` among its
``custom_extensions``."""

STORAGE_DTYPES = (DType.float32, DType.bfloat16)
"""What W0, U, s and V can be stored in."""

Operand: TypeAlias = "TensorValue | Weight"


@dataclass(frozen=True)
class Projection:
    """The operands of one projection, all of one dtype and on one device.

    Attributes:
        w0: The base ``[out, in]``.
        u: ``[out, r]``, or None (with s and v) for a projection that is only a base.
        s: ``[r]``.
        v: ``[r, in]``.
    """

    w0: Operand
    u: Operand | None = None
    s: Operand | None = None
    v: Operand | None = None


def generated_linear(
    x: Operand, projections: Sequence[Projection], *, matrix_unit: bool = True
) -> TensorValue:
    """Return ``x·W0ᵀ + ((x·Vᵀ)·s)·Uᵀ`` of some projections, side by side.

    Args:
        x: ``[rows, in]``; float32 on a CPU, bfloat16 on a GPU.
        projections: One or more, each of the same ``in``. On a CPU they are stored in
            float32 or bfloat16 and widened in registers, on a GPU in bfloat16. Sums
            are in float32 everywhere.
        matrix_unit: Whether a CPU may use its matrix unit (AMX) for many rows, if it
            has one when the graph runs. The result is as exact without.

    Returns:
        ``[rows, Σ out]`` in x's dtype.

    Raises:
        ValueError: If shapes disagree; the message names the argument.
        TypeError: If a dtype or a device is not what the others are.
    """
    x = TensorValue(x)
    if not projections:
        msg = "projections: expected at least one, found none"
        raise ValueError(msg)
    on_gpu = x.device.is_gpu()
    _expect_rank("x", x, 2)
    _expect_dtype("x", x, (DType.bfloat16 if on_gpu else DType.float32,))
    allowed = (DType.bfloat16,) if on_gpu else STORAGE_DTYPES
    dtype = TensorValue(projections[0].w0).dtype
    operands: list[TensorValue] = []
    factored = 0
    width: Dim = StaticDim(0)
    for index, projection in enumerate(projections):
        found = _checked(f"projections[{index}].", projection, x)
        for name, operand in found.items():
            _expect_dtype(name, operand, allowed)
            _expect_dtype(name, operand, (dtype,))
            if operand.device != x.device:
                msg = f"{name}: expected on {x.device}, as x, found {operand.device}"
                raise TypeError(msg)
        tensors = list(found.values())
        width = width + tensors[0].shape[0]
        if len(tensors) > 1:
            factored |= 1 << index
            # The op takes matrices only.
            tensors[2] = ops.unsqueeze(tensors[2], 0)
        operands += tensors
    return ops.custom(
        GENERATED_LINEAR,
        x.device,
        [x, *operands],
        [TensorType(x.dtype, (x.shape[0], width), x.device)],
        parameters={
            "projections": len(projections),
            "factored": factored,
            "matrix_unit": matrix_unit,
        },
    )[0].tensor


def _checked(
    where: str, projection: Projection, x: TensorValue
) -> dict[str, TensorValue]:
    """Return a projection's operands by name, in the op's order, shapes checked."""
    w0 = TensorValue(projection.w0)
    _expect_rank(where + "w0", w0, 2)
    out_dim, in_dim = w0.shape
    _expect_shape(where + "w0", w0, (out_dim, x.shape[1]))
    factors = {"u": projection.u, "s": projection.s, "v": projection.v}
    given = {
        name: TensorValue(factor)
        for name, factor in factors.items()
        if factor is not None
    }
    found = {where + "w0": w0}
    if not given:
        return found
    for name in factors:
        if name not in given:
            msg = f"{where}{name}: expected with the other factors, found None"
            raise ValueError(msg)
    _expect_rank(where + "s", given["s"], 1)
    rank = given["s"].shape[0]
    _expect_shape(where + "u", given["u"], (out_dim, rank))
    _expect_shape(where + "v", given["v"], (rank, in_dim))
    return found | {where + name: value for name, value in given.items()}


def _expect_rank(name: str, value: TensorValue, rank: int) -> None:
    if value.rank != rank:
        msg = f"{name}: expected {rank} dimensions, found shape {list(value.shape)}"
        raise ValueError(msg)


def _expect_shape(name: str, value: TensorValue, shape: Sequence[Dim]) -> None:
    _expect_rank(name, value, len(shape))
    if list(value.shape) != list(shape):
        msg = f"{name}: expected shape {list(shape)}, found {list(value.shape)}"
        raise ValueError(msg)


def _expect_dtype(name: str, value: TensorValue, allowed: Sequence[DType]) -> None:
    if value.dtype not in allowed:
        wanted = " or ".join(dtype.name for dtype in allowed)
        msg = f"{name}: expected {wanted}, found {value.dtype.name}"
        raise TypeError(msg)
