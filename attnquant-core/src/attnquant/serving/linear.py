"""`AttnQuantLinear`: a projection as shared base plus low-rank term."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn.layer import Module
from max.nn.linear import Linear
from max.nn.stacked_linear import StackedLinear

from attnquant.serving.fused import fused, is_fused
from attnquant.serving.w0 import W0, SharedBase
from attnquant.theta.names import BaseKey


class AttnQuantLinear(Linear):
    """A linear layer that computes ``y = x·W0ᵀ + ((x·Vᵀ)·s)·Uᵀ (+ bias)``.

    A drop-in for MAX's `Linear` wherever it is called; what concatenates or shards
    `.weight` has to be replaced, since there is no such matrix (`StackedProjection`,
    `AttnQuantMLP`). The base belongs to the model: it is lent with `set_w0` before
    each forward and is no weight of this layer.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        dtype: DType,
        device: DeviceRef,
        *,
        base: BaseKey,
        rank: int,
        has_bias: bool = False,
    ) -> None:
        """Declare the factors ``U [out, r]``, ``s [r]``, ``V [r, in]``.

        Args:
            in_dim: Width of the input.
            out_dim: Width of the output.
            dtype: Dtype of the weights.
            device: Where the weights live.
            base: Which shared base this layer uses.
            rank: r; with 0 there are no factors.
            has_bias: Whether to add a bias ``[out]``.
        """
        super().__init__(in_dim, out_dim, dtype, device, is_sharding=True)
        self.base = base
        self.rank = rank
        if rank:
            self.U = Weight("U", dtype, (out_dim, rank), device)
            self.s = Weight("s", dtype, (rank,), device)
            self.V = Weight("V", dtype, (rank, in_dim), device)
        if has_bias:
            self.bias = Weight("bias", dtype, (out_dim,), device)
        # In a tuple, since a module assigned as an attribute would become a child of
        # this one, and the base's weight one of this layer's.
        self._w0: tuple[SharedBase, ...] = ()

    @property
    def weight(self) -> NoReturn:  # type: ignore[override]
        """There is no single weight; whoever asks must be replaced, not served."""
        msg = (
            f"the {self.base.family} of a layer has no single weight: it is a shared"
            " base and a low-rank term. Call the layer instead."
        )
        raise TypeError(msg)

    def set_w0(self, base: SharedBase) -> None:
        """Lend the shared base for the forward that follows."""
        self._w0 = (base,)

    def lent_w0(self) -> SharedBase:
        """Return the base that was lent.

        Raises:
            RuntimeError: If none was.
        """
        if not self._w0:
            msg = f"{self.base.family}: call set_w0() before the forward"
            raise RuntimeError(msg)
        return self._w0[0]

    def __call__(self, x: TensorValue) -> TensorValue:
        """Apply the projection to ``x [..., in]``; returns ``[..., out]``.

        Raises:
            RuntimeError: If no base was lent.
        """
        y = self.lent_w0()(x)
        if self.rank:
            device = x.device
            low = (x @ self.V.to(device).T) * self.s.to(device)
            y = y + low @ self.U.to(device).T
        if self.bias is not None:
            y = y + self.bias.to(x.device)
        return y


class StackedProjection(StackedLinear):
    """Projections of one input, side by side: ``[..., Σ out]``.

    MAX's `StackedLinear` concatenates its children's weights; where a child has a
    shared base, this one concatenates their outputs instead, and where they are
    fused, one op computes them all.
    """

    def __init__(self, names: Sequence[str], projections: Sequence[Linear]) -> None:
        """Hold projections under their names, which are also their weights' names."""
        super().__init__(
            in_dim=0,
            out_dims=[],
            names=names,
            dtype=DType.float32,
            device=projections[0].device,
            has_bias=projections[0].bias is not None,
            _is_sharding=True,
        )
        for name, projection in zip(names, projections, strict=True):
            setattr(self, name, projection)

    def __call__(self, x: TensorValue) -> TensorValue:
        """Apply all projections to ``x [..., in]``."""
        children = [self._child(name) for name in self._names]
        if is_fused(children):
            return fused(x, children)
        if not any(isinstance(child, AttnQuantLinear) for child in children):
            return super().__call__(x)
        return ops.concat([child(x) for child in children], axis=-1)


def attnquant_linears(module: Module) -> Iterator[AttnQuantLinear]:
    """Yield every `AttnQuantLinear` below a module."""
    for child in module.sublayers.values():
        if isinstance(child, AttnQuantLinear):
            yield child
        else:
            yield from attnquant_linears(child)


def set_w0(module: Module, w0: W0) -> None:
    """Lend every projection below a module (a decoder layer, say) its base."""
    for linear in attnquant_linears(module):
        linear.set_w0(w0.base(linear.base))
