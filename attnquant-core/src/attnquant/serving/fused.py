"""The `fused` formulation: linears that the op of attnquant-kernels computes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeGuard, runtime_checkable

from max.graph import TensorValue, ops
from max.nn.linear import Linear

from attnquant.errors import ServingError

if TYPE_CHECKING:
    from attnquant_kernels.graph import Projection


@runtime_checkable
class Fusable(Protocol):
    """A linear that tells the op its operands instead of computing by itself."""

    def projection(self) -> Projection:
        """Return W0 and, if there are any, U, s and V."""
        ...


def is_fused(linears: Sequence[Linear]) -> TypeGuard[Sequence[Fusable]]:
    """Return whether the op computes these linears; they are all of one kind."""
    return all(isinstance(linear, Fusable) for linear in linears)


def fused(x: TensorValue, linears: Sequence[Fusable]) -> TensorValue:
    """Apply linears of one input in one op.

    Args:
        x: ``[..., in]``.
        linears: Those to apply.

    Returns:
        Their outputs side by side, ``[..., Σ out]``.
    """
    from attnquant_kernels.graph import generated_linear

    flat = x if x.rank == 2 else x.reshape((-1, x.shape[-1]))  # noqa: PLR2004
    y = generated_linear(flat, [linear.projection() for linear in linears])
    if x.rank != flat.rank:
        y = y.reshape((*x.shape[:-1], y.shape[-1]))
    biases = [linear.bias for linear in linears if isinstance(linear, Linear)]
    present = [TensorValue(bias) for bias in biases if bias is not None]
    if not present:
        return y
    if len(present) < len(linears):
        msg = "of linears that share an input either all have a bias or none"
        raise ValueError(msg)
    return y + ops.concat(present).to(y.device)


class FusedDense(Linear):
    """A linear with a matrix of its own, computed by the op."""

    def projection(self) -> Projection:
        """Return the matrix as a base without a low-rank term."""
        from attnquant_kernels.graph import Projection

        return Projection(self.weight)

    def __call__(self, x: TensorValue) -> TensorValue:
        """Apply the linear to ``x [..., in]``; returns ``[..., out]``."""
        return fused(x, [self])


def kernel_extensions() -> list[Path]:
    """Return the Mojo packages that a graph with the op has to be given.

    Raises:
        ServingError: If attnquant-kernels is not installed.
    """
    try:
        from attnquant_kernels import mojo_package
    except ModuleNotFoundError as error:
        if error.name != "attnquant_kernels":
            raise
        raise ServingError(
            "ATTNQUANT_FORMULATION=fused",
            expected="the package attnquant-kernels",
            found="no such package",
            hint="`pip install attnquant-kernels`, or serve with `gemm`.",
        ) from error
    return [mojo_package()]
