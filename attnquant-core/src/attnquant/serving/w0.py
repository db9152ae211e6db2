"""Shared bases in the graph: declared once per model, lent to layers."""

from __future__ import annotations

from typing import NoReturn, Protocol, runtime_checkable

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight
from max.nn.layer import Module

from attnquant.theta.layout import Matrix, ThetaLayout
from attnquant.theta.names import BaseKey


@runtime_checkable
class SharedBase(Protocol):
    """A base as layers see it: something that computes ``x·W0ᵀ``.

    How it is stored is its own affair, so that a quantised base can take the place of
    a float one. Layers must not ask for more than this.
    """

    def __call__(self, x: TensorValue) -> TensorValue:
        """Return ``x [..., in] · W0ᵀ``, of shape ``[..., out]``."""
        ...


@runtime_checkable
class FusableBase(SharedBase, Protocol):
    """A base that the fused kernel can read as well."""

    def operand(self) -> Weight:
        """Return the matrix ``[out, in]`` that the kernel is given."""
        ...


class FloatBase(Module):
    """A base stored as a float matrix ``[out, in]``."""

    def __init__(
        self, family: str, shape: Matrix, dtype: DType, device: DeviceRef
    ) -> None:
        super().__init__()
        self.weight = Weight(family, dtype, shape, device)

    @property
    def _omit_module_attr_name(self) -> bool:
        # The weight is named W0.{band}.{family}, without a level for this module.
        return True

    def __call__(self, x: TensorValue) -> TensorValue:
        """Return ``x [..., in] · W0ᵀ``, of shape ``[..., out]``."""
        return x @ self.weight.to(x.device).T

    def operand(self) -> Weight:
        """Return the matrix ``[out, in]``."""
        return self.weight


class _Level(Module):
    """One level of the names ``W0.{band}.{group}``: bases or further levels."""

    def __getitem__(self, key: str | int) -> Module:
        return self.sublayers[str(key)]

    def __call__(self) -> NoReturn:
        """Refuse: MAX's modules are callable, but names compute nothing."""
        msg = "call one base, such as W0[band][family]"
        raise TypeError(msg)

    def level(self, key: str | int) -> _Level:
        """Return the level below under a key, made if need be."""
        if str(key) not in self.sublayers:
            setattr(self, str(key), _Level())
        below = self[key]
        assert isinstance(below, _Level)
        return below


class W0(_Level):
    """All bases of a model: ``W0[band][family]``, or ``W0[band][group][family]``."""

    def __init__(self, layout: ThetaLayout, dtype: DType, device: DeviceRef) -> None:
        """Declare the bases.

        Args:
            layout: Which bases there are.
            dtype: Dtype that the bases are stored in.
            device: Where they live.
        """
        super().__init__()
        for base, shape in layout.shapes.items():
            level = self.level(base.band)
            if base.group:
                level = level.level(base.group)
            setattr(level, base.family, FloatBase(base.family, shape, dtype, device))

    def base(self, key: BaseKey) -> SharedBase:
        """Return one base."""
        level = self.level(key.band)
        if key.group:
            level = level.level(key.group)
        base = level[key.family]
        assert isinstance(base, SharedBase)
        return base
