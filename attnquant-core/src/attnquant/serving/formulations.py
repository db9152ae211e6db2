"""Formulations: how ``W_eff x`` is computed, and what that asks of the weights."""

from __future__ import annotations

import os
from collections.abc import Mapping

from attnquant.serving.pages import ReadOnlyFiles
from attnquant.settings import FORMULATION, FORMULATIONS
from attnquant.theta.decompose import effective_weight
from attnquant.theta.dtypes import Array
from attnquant.theta.layout import ThetaLayout
from attnquant.theta.names import base_name, is_theta_name, projection_name


def current_formulation() -> str:
    """Return the formulation that `ATTNQUANT_FORMULATION` asks for.

    Raises:
        SettingError: If there is no such formulation.
    """
    return str(FORMULATION.read(os.environ) or FORMULATIONS[0])


def use_gemm_formulation(formulation: str | None = None) -> bool:
    """Return whether projections are ``x·W0ᵀ + ((x·Vᵀ)·s)·Uᵀ`` inside the graph.

    Args:
        formulation: By default what the environment asks for.
    """
    return (formulation or current_formulation()) == "gemm"


def use_fused_formulation(formulation: str | None = None) -> bool:
    """Return whether one custom op computes a projection, base and low-rank term.

    Args:
        formulation: By default what the environment asks for.
    """
    return (formulation or current_formulation()) == "fused"


def use_precomputed_weff_outside(formulation: str | None = None) -> bool:
    """Return whether W_eff is rebuilt on the host and the graph holds stock linears.

    Args:
        formulation: By default what the environment asks for.
    """
    return (formulation or current_formulation()) == "dense"


def precompute_weff_outside_graph(
    theta: Mapping[str, Array], layout: ThetaLayout
) -> dict[str, Array]:
    """Replace theta tensors by effective weights, outside the graph.

    Args:
        theta: Theta tensors and all others, by canonical name.
        layout: Which layer uses which base.

    Returns:
        Canonical name to ``[out, in]`` float32 ``W_eff`` for each projection that has
        a base; other tensors as they were.
    """
    weights = {name: theta[name] for name in theta if not is_theta_name(name)}
    files = ReadOnlyFiles()
    for base, layers in layout.bases.items():
        for layer in layers:
            weights[projection_name(layer, base.family)] = effective_weight(
                theta, base, layer
            )
        # What it was made of is not needed again.
        files.release(theta[base_name(*base)])
    return weights
