"""The offline half: families, bands, decomposition and theta bundles.

Only numpy (with ml_dtypes for bfloat16) and safetensors are needed here; nothing in
this package imports max.
"""

from attnquant.theta.bands import band_index, layer_to_band
from attnquant.theta.decompose import (
    decompose_standard_state_dict_to_attnquant,
    is_attnquant_theta_dict,
    reconstruct,
    relative_frobenius_error,
)
from attnquant.theta.families import (
    ATTN_FAMILIES,
    FAMILIES,
    MLP_FAMILIES,
    tied_families_for,
)
from attnquant.theta.grouping import UNNAMED, NoBase
from attnquant.theta.layout import ThetaLayout, make_layout

__all__ = [
    "ATTN_FAMILIES",
    "FAMILIES",
    "MLP_FAMILIES",
    "UNNAMED",
    "NoBase",
    "ThetaLayout",
    "band_index",
    "decompose_standard_state_dict_to_attnquant",
    "is_attnquant_theta_dict",
    "layer_to_band",
    "make_layout",
    "reconstruct",
    "relative_frobenius_error",
    "tied_families_for",
]
