"""Tensor names: canonical ones, and those of the theta tensors.

Canonical names are what a prefix map turns a checkpoint's names into:
``layers.{i}.self_attn.q_proj.weight``, ``embed_tokens.weight``, ... Theta names are

    W0.{band}.{family}            uniform
    W0.{band}.{group}.{family}    grouped
    layers.{i}.{family}.{U,s,V}
"""

from __future__ import annotations

import re
from typing import NamedTuple

from attnquant.theta.families import FAMILIES, module_of

FACTORS = ("U", "s", "V")

_FAMILY = "|".join(FAMILIES)
_PROJECTION_RE = re.compile(
    rf"layers\.(?P<layer>\d+)\.(?:self_attn|mlp)\.(?P<family>{_FAMILY})\.weight"
)
_FACTOR_RE = re.compile(
    rf"layers\.(?P<layer>\d+)\.(?P<family>{_FAMILY})\.(?P<factor>U|s|V)"
)
_BASE_RE = re.compile(
    rf"W0\.(?P<band>\d+)\.(?:(?P<group>[^.]+)\.)?(?P<family>{_FAMILY})"
)


class ProjectionKey(NamedTuple):
    """One projection of one layer."""

    layer: int
    family: str


class FactorKey(NamedTuple):
    """One factor (U, s or V) of one projection."""

    layer: int
    family: str
    factor: str


class BaseKey(NamedTuple):
    """One shared base; `group` is empty in a uniform model."""

    band: int
    group: str
    family: str


def projection_name(layer: int, family: str) -> str:
    """Return the canonical name of a projection's weight ``[out, in]``."""
    return f"layers.{layer}.{module_of(family)}.{family}.weight"


def base_name(band: int, group: str, family: str) -> str:
    """Return the name of a shared base ``[out, in]``."""
    return ".".join(part for part in ("W0", str(band), group, family) if part)


def factor_name(layer: int, family: str, factor: str) -> str:
    """Return the name of ``U [out, r]``, ``s [r]`` or ``V [r, in]``."""
    return f"layers.{layer}.{family}.{factor}"


def parse_projection(name: str) -> ProjectionKey | None:
    """Return which projection a canonical name is the weight of, if any."""
    if not (match := _PROJECTION_RE.fullmatch(name)):
        return None
    key = ProjectionKey(int(match["layer"]), match["family"])
    return key if projection_name(*key) == name else None


def parse_factor(name: str) -> FactorKey | None:
    """Return which factor a name is, if any."""
    if not (match := _FACTOR_RE.fullmatch(name)):
        return None
    key = FactorKey(int(match["layer"]), match["family"], match["factor"])
    return key if factor_name(*key) == name else None


def parse_base(name: str) -> BaseKey | None:
    """Return which base a name is, if any."""
    if not (match := _BASE_RE.fullmatch(name)):
        return None
    key = BaseKey(int(match["band"]), match["group"] or "", match["family"])
    return key if base_name(*key) == name else None


def is_theta_name(name: str) -> bool:
    """Return whether a tensor of this name belongs to a decomposition."""
    return parse_factor(name) is not None or parse_base(name) is not None
