"""Slow and exact references, in float64, for what kernels compute fast."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def generated_linear(
    x: Array,
    w0: Array,
    u: Array | None = None,
    s: Array | None = None,
    v: Array | None = None,
) -> npt.NDArray[np.float64]:
    """Return ``y = x·W0ᵀ + ((x·Vᵀ)·s)·Uᵀ``.

    Args:
        x: ``[rows, in]``.
        w0: The shared base ``[out, in]``.
        u: ``[out, r]``; leave out u, s and v for a plain linear.
        s: ``[r]``.
        v: ``[r, in]``.

    Returns:
        ``[rows, out]``, every operand widened to float64 first.

    Raises:
        ValueError: If shapes disagree, or some factors are given and others not;
            the message names the argument.
    """
    _check(x, ("rows", "in"), "x", {})
    sizes = {"rows": x.shape[0], "in": x.shape[1]}
    _check(w0, ("out", "in"), "w0", sizes)
    sizes["out"] = w0.shape[0]
    y = _wide(x) @ _wide(w0).T
    factors = {"u": u, "s": s, "v": v}
    missing = [name for name, factor in factors.items() if factor is None]
    if u is None or s is None or v is None:
        if len(missing) < len(factors):
            msg = f"{missing[0]}: expected with the other factors, found None"
            raise ValueError(msg)
        return y
    _check(s, ("r",), "s", {})
    sizes["r"] = s.shape[0]
    _check(u, ("out", "r"), "u", sizes)
    _check(v, ("r", "in"), "v", sizes)
    return y + ((_wide(x) @ _wide(v).T) * _wide(s)) @ _wide(u).T


def _wide(array: Array) -> npt.NDArray[np.float64]:
    return np.asarray(array, dtype=np.float64)


def _check(
    array: Array, axes: tuple[str, ...], name: str, sizes: dict[str, int]
) -> None:
    expected = tuple(sizes.get(axis) for axis in axes)
    agrees = len(array.shape) == len(axes) and all(
        size in {None, found} for size, found in zip(expected, array.shape, strict=True)
    )
    if not agrees:
        wanted = ", ".join(
            axis if size is None else f"{axis}={size}"
            for axis, size in zip(axes, expected, strict=True)
        )
        msg = f"{name}: expected shape [{wanted}], found {list(array.shape)}"
        raise ValueError(msg)
