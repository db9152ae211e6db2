"""Making a layer's projections as layout and formulation ask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from max.dtype import DType
from max.graph import DeviceRef
from max.nn.linear import Linear

from attnquant.errors import CheckpointError, ServingError
from attnquant.needs import GPU_RANK
from attnquant.serving.formulations import (
    use_fused_formulation,
    use_precomputed_weff_outside,
)
from attnquant.serving.fused import FusedDense
from attnquant.serving.fused_linear import FusedLinear
from attnquant.serving.linear import AttnQuantLinear
from attnquant.theta.layout import ThetaLayout
from attnquant.theta.names import projection_name


@dataclass(frozen=True)
class ProjectionMaker:
    """Makes linears: `AttnQuantLinear` where a base is shared, stock ones elsewhere.

    Attributes:
        layout: Which projection has which base.
        formulation: One of `attnquant.settings.FORMULATIONS`.
        dtype: Dtype of weights and activations.
        device: Where they live.
        storage: Dtype of the weights where it is another, which only the op of
            `fused` can read; see `attnquant.serving.storage`.
    """

    layout: ThetaLayout
    formulation: str
    dtype: DType
    device: DeviceRef
    storage: DType | None = None

    def make(
        self,
        layer: int,
        dims: Mapping[str, tuple[int, int]],
        *,
        has_bias: bool = False,
    ) -> dict[str, Linear]:
        """Make some projections of one layer.

        Args:
            layer: Decoder layer.
            dims: ``(out, in)`` of each family, as the model's config has it.
            has_bias: Whether they add a bias.

        Raises:
            CheckpointError: If the checkpoint's matrix has other dimensions.
        """
        return {
            family: self._make(layer, family, out_dim, in_dim, has_bias)
            for family, (out_dim, in_dim) in dims.items()
        }

    def _make(
        self, layer: int, family: str, out_dim: int, in_dim: int, has_bias: bool
    ) -> Linear:
        base = self.layout.base_of(layer, family)
        if base is not None and self.layout.shapes[base] != (out_dim, in_dim):
            raise CheckpointError(
                projection_name(layer, family),
                expected=f"shape {[out_dim, in_dim]}, from config.json",
                found=f"shape {list(self.layout.shapes[base])}",
            )
        fused = use_fused_formulation(self.formulation)
        dtype = self.storage or self.dtype
        if base is None or use_precomputed_weff_outside(self.formulation):
            dense = FusedDense if fused else Linear
            return dense(in_dim, out_dim, dtype, self.device, has_bias=has_bias)
        rank = self.layout.rank_of(base)
        if rank % GPU_RANK and self.device.is_gpu() and not fused:
            raise ServingError(
                f"the rank of {projection_name(layer, family)}",
                expected=f"a multiple of {GPU_RANK} on a GPU",
                found=str(rank),
                hint="Make a bundle of such a rank, or serve it as `dense`.",
            )
        shared = FusedLinear if fused else AttnQuantLinear
        return shared(
            in_dim,
            out_dim,
            dtype,
            self.device,
            base=base,
            rank=rank,
            has_bias=has_bias,
        )
