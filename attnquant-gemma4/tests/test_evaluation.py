"""Calibration finds every input of Gemma 4's projections; evaluation measures it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from max.graph import Graph
from max.pipelines.lib.graph_specs import GraphRole
from max.pipelines.lib.interfaces import pipeline_model
from scipy.special import log_softmax
from tokenizers import Tokenizer

from attnquant.cli.main import main
from attnquant.serving.probe import Probe
from attnquant.serving.taps import TappedDecoder
from attnquant.testing.checkpoints import read_checkpoint
from attnquant.testing.parity import make_bundle
from attnquant.theta.statistics import INPUTS
from gemma4_support import golden, oracle
from gemma4_support.tiny import BOS, write_tiny_checkpoint

WINDOW = 150
"""More than the sliding window of 128, so that layers of both kinds differ."""

TEXT = """
Layers of two kinds take turns here, and those of one kind share what they have in
common. Whatever is lost by it has to show in how well the words of this text are
foretold, which is measured twice: by the command, and slowly, in double precision.
"""
SETTING = golden.Setting("g2-r4-all", 2, 4)


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
        Probe(path, window=WINDOW)
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


@pytest.mark.exhaustive
def test_a_bundle_is_compared_with_its_checkpoint_as_the_oracle_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # In each band, layers of both kinds, and one kind that shares: a compile.
    path = write_tiny_checkpoint(tmp_path / "tiny", layer_types="sfsfsf")
    bundle = make_bundle(path, SETTING, tmp_path / "bundle")
    (tmp_path / "text").write_text(TEXT * 2, encoding="utf-8")
    arguments = ["eval", str(bundle), "--reference", str(path), "--json"]
    arguments += ["--text", str(tmp_path / "text"), "--window", str(WINDOW)]
    capsys.readouterr()
    assert main(arguments) == 0
    shown = json.loads(capsys.readouterr().out)

    weights, config = read_checkpoint(path)
    changed = oracle.substitute_weff(weights, config, 4, 2, "all")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokens = tokenizer.encode(TEXT * 2, add_special_tokens=False).ids
    starts = range(0, len(tokens), WINDOW - 1)
    windows = [[BOS, *tokens[i : i + WINDOW - 1]] for i in starts]
    assert len(windows) > 2
    before, after = (
        [log_softmax(oracle.forward(w, config, t)[:-1], axis=1) for t in windows]
        for w in (weights, changed)
    )
    divergence = np.concatenate(
        [(np.exp(p) * (p - q)).sum(axis=1) for p, q in zip(before, after, strict=True)]
    )
    expected = {
        "tokens": len(tokens),
        "reference_perplexity": perplexity(before, windows),
        "perplexity": perplexity(after, windows),
        "mean_kl": divergence.mean(),
        "max_kl": divergence.max(),
    }
    (found,) = shown["texts"]
    figures = {name: found[name] for name in expected}
    print(figures)
    assert shown["reference_is_source"] is True
    assert figures == pytest.approx(expected, rel=2e-4)
    assert found["mean_kl"] > 0.01  # or nothing was measured


def perplexity(predicted: list[npt.NDArray[Any]], windows: list[list[int]]) -> float:
    chosen = [
        p[np.arange(len(window) - 1), window[1:]]
        for p, window in zip(predicted, windows, strict=True)
    ]
    return math.exp(-np.concatenate(chosen).mean())
