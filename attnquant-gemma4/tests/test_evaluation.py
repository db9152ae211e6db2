"""Calibration finds every input of Gemma 4's projections; traced, and not compiled."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from max.graph import Graph
from max.pipelines.lib.graph_specs import GraphRole
from max.pipelines.lib.interfaces import pipeline_model

from attnquant.serving.probe import Probe
from attnquant.serving.taps import TappedDecoder
from attnquant.testing.checkpoints import read_checkpoint
from attnquant.theta.statistics import INPUTS
from gemma4_support.tiny import write_tiny_checkpoint


class TracedInsteadError(Exception):
    """Raised in the place of compiling."""

    def __init__(self, module: TappedDecoder, graph: Graph) -> None:
        super().__init__()
        self.module = module
        self.graph = graph


def trace(_session: object, specs: Mapping[str, Any]) -> None:
    spec = specs[GraphRole.DECODER]
    raise TracedInsteadError(spec.module, spec.trace())


def test_every_input_is_tapped_at_its_own_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_checkpoint(tmp_path / "tiny")
    monkeypatch.setattr(pipeline_model, "compile_graphs", trace)
    with pytest.raises(TracedInsteadError) as caught:
        Probe(path, window=150)
    keys, types = caught.value.module.keys, caught.value.graph.output_types
    weights, config = read_checkpoint(path)
    layers = config["text_config"]["num_hidden_layers"]
    assert list(keys) == [(i, name) for i in range(layers) for name in INPUTS]
    # Last token's logits, those that were asked for, where they begin; then the taps.
    assert len(types) == 3 + len(keys)
    paths = dict(
        zip(
            INPUTS,
            ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"),
            strict=True,
        )
    )
    for key, tap in zip(keys, types[3:], strict=True):
        suffix = f"layers.{key.layer}.{paths[key.input]}.weight"
        (name,) = (name for name in weights if name.endswith(suffix))
        # Head dims differ between kinds of layers, and so does the width of `o`.
        assert int(tap.shape[1]) == weights[name].shape[1], name
