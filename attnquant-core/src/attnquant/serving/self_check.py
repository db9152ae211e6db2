"""A known-good tiny run: one decomposed projection, compiled by MAX and compared."""

from __future__ import annotations

import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType
from max.nn.layer import Module
from max.nn.linear import Linear

from attnquant.errors import ServingError
from attnquant.serving.linear import set_w0
from attnquant.serving.projections import ProjectionMaker
from attnquant.serving.w0 import W0
from attnquant.theta.decompose import (
    decompose_standard_state_dict_to_attnquant,
    reconstruct,
)
from attnquant.theta.families import FAMILIES
from attnquant.theta.layout import ThetaLayout, make_layout
from attnquant.theta.names import ProjectionKey, projection_name

OUT, IN, TOKENS, RANK, LAYERS = 24, 16, 3, 4, 2
TOLERANCE = 1e-4
"""The largest difference between float32 on MAX and float64 on numpy."""


class _Probe(Module):
    """One projection of the first layer, with its base."""

    def __init__(self, layout: ThetaLayout) -> None:
        super().__init__()
        device = DeviceRef.CPU()
        self.W0 = W0(layout, DType.float32, device)
        maker = ProjectionMaker(layout, "gemm", DType.float32, device)
        self.q_proj: Linear = maker.make(0, {"q_proj": (OUT, IN)})["q_proj"]

    def __call__(self, x: object) -> object:
        """Apply the projection to ``x [tokens, in]``."""
        set_w0(self, self.W0)
        return self.q_proj(x)  # type: ignore[arg-type]


def run_tiny_projection() -> float:
    """Decompose two random layers, run one on MAX's CPU, and compare with numpy.

    Returns:
        The largest absolute difference.

    Raises:
        ServingError: If it is above `TOLERANCE`.
    """
    layout, theta = _decomposed()
    probe = _Probe(layout)
    weights = {
        name: np.ascontiguousarray(
            theta[f"layers.0.{name}" if name.startswith("q_proj.") else name]
        )
        for name in probe.raw_state_dict()
    }
    probe.load_state_dict(weights, weight_alignment=1)
    with Graph(
        "attnquant_self_check",
        input_types=[TensorType(DType.float32, ["tokens", IN], DeviceRef.CPU())],
    ) as graph:
        graph.output(probe(graph.inputs[0].tensor))  # type: ignore[arg-type]
    session = InferenceSession(devices=[CPU()])
    model = session.load(graph, weights_registry=probe.state_dict())
    x = np.linspace(-1, 1, TOKENS * IN, dtype=np.float32).reshape(TOKENS, IN)
    (found,) = model.execute(x)
    effective = reconstruct(theta, layout)[projection_name(0, "q_proj")]
    expected = x.astype(np.float64) @ effective.astype(np.float64).T
    apart = float(np.abs(np.asarray(found.to_numpy()) - expected).max())
    if not apart < TOLERANCE:
        raise ServingError(
            "a tiny projection on MAX",
            expected=f"numpy's result within {TOLERANCE}",
            found=f"a difference of {apart:.2e}",
        )
    return apart


def _decomposed() -> tuple[ThetaLayout, dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    state = {
        projection_name(layer, family): random.normal(size=(OUT, IN)).astype(np.float32)
        for layer in range(LAYERS)
        for family in FAMILIES
    }
    layout = make_layout(
        {ProjectionKey(i, f): (OUT, IN) for i in range(LAYERS) for f in FAMILIES},
        num_layers=LAYERS,
        shared_blocks=1,
        lora_rank=RANK,
    )
    return layout, decompose_standard_state_dict_to_attnquant(state, RANK, 1)
