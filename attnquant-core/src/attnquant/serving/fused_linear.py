"""A projection with a shared base under the `fused` formulation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from max.graph import TensorValue

from attnquant.errors import ServingError
from attnquant.serving.fused import fused
from attnquant.serving.linear import AttnQuantLinear
from attnquant.serving.w0 import FusableBase

if TYPE_CHECKING:
    from attnquant_kernels.graph import Projection


class FusedLinear(AttnQuantLinear):
    """`AttnQuantLinear`, computed by the op instead of MAX's matmuls."""

    def projection(self) -> Projection:
        """Return W0 and, if there are any, U, s and V.

        Raises:
            RuntimeError: If no base was lent.
            ServingError: If the base is stored in a way that the op cannot read.
        """
        from attnquant_kernels.graph import Projection

        base = self.lent_w0()
        if not isinstance(base, FusableBase):
            raise ServingError(
                "ATTNQUANT_FORMULATION",
                expected="gemm, for bases stored like this one",
                found=f"fused, and a {type(base).__name__}",
            )
        if not self.rank:
            return Projection(base.operand())
        return Projection(base.operand(), self.U, self.s, self.V)

    def __call__(self, x: TensorValue) -> TensorValue:
        """Apply the projection to ``x [..., in]``; returns ``[..., out]``."""
        return fused(x, [self])
