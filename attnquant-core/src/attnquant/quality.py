"""Settings that the page "Quality" calls unusable, told from what a bundle records."""

from __future__ import annotations

from attnquant.theta.bundle import BundleInfo
from attnquant.theta.decompose import MEAN_SVD
from attnquant.theta.families import FAMILIES
from attnquant.theta.layout import ThetaLayout

EXACT = 0.01
"""Relative error of weights below which the plain method has lost nothing to speak of:
bfloat16 alone loses a third of it."""

LOST = 0.5
"""Error of weights, averaged over all seven families, from which a calibrated bundle is
as the unusable one of the page; the usable ones are below 0.3."""


def doubtful(layout: ThetaLayout, bundle: BundleInfo | None) -> str:
    """Return in words why a model will be of no use; nothing if that is not known.

    Args:
        layout: Which layers share a base.
        bundle: The bundle that is served; None for a checkpoint that is decomposed at
            the start, which is done by the plain method, and whose errors are not
            recorded.
    """
    if layout.is_passthrough:
        return ""
    errors = None if bundle is None else bundle.error
    where = f"G={layout.shared_blocks} of {layout.num_layers} layers"
    if bundle is None or bundle.method == MEAN_SVD:
        if errors is not None and max(errors.values(), default=0.0) < EXACT:
            return ""
        return (
            f"{where} by the method {MEAN_SVD}, which destroys a model away from"
            " passthrough: expect no sensible text. Make a bundle with"
            " `attnquant calibrate` and `attnquant decompose --statistics`, and see"
            ' the page "Quality"'
        )
    mean = sum(bundle.error.values()) / len(FAMILIES)
    if mean < LOST:
        return ""
    return (
        f"{where}, and {mean:.0%} of the weights lost: on Gemma 3 270M that was not"
        ' usable. More blocks, or fewer families, lose less; see the page "Quality"'
    )
