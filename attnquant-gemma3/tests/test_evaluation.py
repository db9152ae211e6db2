"""`attnquant calibrate` and `eval` on MAX give what a float64 oracle gives.

Everything here runs one graph: original and bundle have the same in the `dense`
formulation, and statistics come out of it too.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer

from attnquant.cli.main import main
from attnquant.testing.checkpoints import read_checkpoint
from attnquant.testing.parity import make_bundle
from attnquant.theta.statistics import InputKey, open_statistics
from gemma3_support import golden, oracle
from gemma3_support.tiny import BOS, write_tiny_checkpoint

Array = npt.NDArray[Any]

WINDOW = 150
"""More than the sliding window of 128, so that layers of both kinds differ."""

TEXT = """
On this test, the statistics of what a layer is given are compared with those of a
slow reference, and so are the predictions. The text says nothing of any interest,
but has some words in it twice: the statistics, the reference, the layer, the test.
"""
FAMILIES = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
SETTING = golden.Setting("g3-r4-all", 3, 4)


class Recording(oracle._Net):
    """The oracle, with what each projection was applied to."""

    def __init__(self, weights: oracle.Weights, config: oracle.Config) -> None:
        super().__init__(weights, oracle._Model.read(config), np.dtype(np.float64))
        self.seen: dict[str, Array] = {}

    def _linear(self, x: Array, name: str) -> Array:
        self.seen[name] = x
        return super()._linear(x, name)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluation") / "tiny"
    return write_tiny_checkpoint(path, add_bos=True)


@pytest.fixture(scope="module")
def text(checkpoint: Path) -> Path:
    path = checkpoint.parent / "text.txt"
    path.write_text(TEXT * 2, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def windows(checkpoint: Path, text: Path) -> list[list[int]]:
    """Cut the text as the commands should: <bos>, and what fits behind it."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokens = tokenizer.encode(text.read_text(), add_special_tokens=False).ids
    step = WINDOW - 1
    cut = [[BOS, *tokens[i : i + step]] for i in range(0, len(tokens), step)]
    assert len(cut) > 2
    return cut


def test_statistics_are_those_of_the_oracle(
    checkpoint: Path, text: Path, windows: list[list[int]], tmp_path: Path
) -> None:
    out = tmp_path / "statistics"
    arguments = ["calibrate", str(checkpoint), "--text", str(text), "--out", str(out)]
    assert main([*arguments, "--window", str(WINDOW)]) == 0
    statistics = open_statistics(out)

    weights, config = read_checkpoint(checkpoint)
    rows: dict[str, list[Array]] = {}
    for window in windows:
        net = Recording(weights, config)
        net.hidden(np.asarray(window))
        for name, x in net.seen.items():
            rows.setdefault(name, []).append(x)
    paths = {
        "qkv": "self_attn.q_proj",
        "o": "self_attn.o_proj",
        "gate_up": "mlp.gate_proj",
        "down": "mlp.down_proj",
    }
    worst = 0.0
    for layer in range(8):
        for name, path in paths.items():
            x = np.vstack(rows[f"model.layers.{layer}.{path}"])
            expected = x.T @ x / len(x)
            key = InputKey(layer, name)
            assert statistics.tokens[key] == len(x)
            apart = np.linalg.norm(statistics.moment(key) - expected)
            worst = max(worst, float(apart / np.linalg.norm(expected)))
    print(f"worst relative distance of a moment: {worst:.1e}")
    assert worst < 1e-5
    assert len(statistics.tokens) == 8 * len(paths)


def evaluated(bundle: Path, checkpoint: Path, text: Path, capsys: Any) -> Any:
    capsys.readouterr()
    arguments = ["eval", str(bundle), "--reference", str(checkpoint)]
    arguments += ["--text", str(text), "--window", str(WINDOW), "--json"]
    assert main([*arguments, "--max-ratio", "1e9"]) == 0
    return json.loads(capsys.readouterr().out)


def effective(checkpoint: Path, bundle: Path) -> dict[str, Array]:
    """Multiply a bundle out in float64, under the checkpoint's names."""
    weights, _ = read_checkpoint(checkpoint)
    theta, _ = read_checkpoint(bundle)
    for layer in range(8):
        for module, families in FAMILIES.items():
            for family in families:
                base = theta[f"W0.{layer * 3 // 8}.{family}"].astype(np.float64)
                u, s, v = (
                    theta[f"layers.{layer}.{family}.{factor}"].astype(np.float64)
                    for factor in "UsV"
                )
                name = f"model.layers.{layer}.{module}.{family}.weight"
                weights[name] = base + (u * s) @ v
    return weights


def test_predictions_are_compared_as_the_oracle_has_them(
    checkpoint: Path,
    text: Path,
    windows: list[list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bundle = make_bundle(checkpoint, SETTING, tmp_path / "bundle")
    shown = evaluated(bundle, checkpoint, text, capsys)
    assert shown["reference_is_source"] is True
    (found,) = shown["texts"]

    weights, config = read_checkpoint(checkpoint)
    changed = effective(checkpoint, bundle)
    log_p, log_q, kls, agreed = [], [], [], 0
    for window in windows:
        p = log_softmax(oracle.forward(weights, config, window)[:-1])
        q = log_softmax(oracle.forward(changed, config, window)[:-1])
        chosen = np.arange(len(window) - 1), window[1:]
        log_p += list(p[chosen])
        log_q += list(q[chosen])
        kls += list((np.exp(p) * (p - q)).sum(axis=1))
        agreed += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
    count = len(log_p)
    expected = {
        "tokens": count,
        "reference_perplexity": math.exp(-np.mean(log_p)),
        "perplexity": math.exp(-np.mean(log_q)),
        "mean_kl": np.mean(kls),
        "max_kl": max(kls),
        "top1_agreement": agreed / count,
        "max_log_probability_difference": np.abs(np.subtract(log_p, log_q)).max(),
        "ratio": math.exp(np.mean(log_p) - np.mean(log_q)),
    }
    figures = {name: found[name] for name in expected}
    print(figures)
    assert figures == pytest.approx(expected, rel=2e-4)
    assert found["mean_kl"] > 0.01  # or nothing was measured


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def test_at_passthrough_nothing_is_lost_whatever_the_environment_says(
    checkpoint: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = golden.Setting("passthrough", None, 0)
    bundle = make_bundle(checkpoint, setting, tmp_path / "bundle")
    # What would decompose the reference while it is loaded, and refuse the bundle.
    monkeypatch.setenv("ATTNQUANT_BLOCKS", "1")
    monkeypatch.setenv("ATTNQUANT_RANK", "1")
    (found,) = evaluated(bundle, checkpoint, text, capsys)["texts"]
    assert found["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert found["max_kl"] < 1e-6
    assert found["top1_agreement"] == 1.0


def test_what_max_cannot_run_is_told_in_one_line(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["calibrate", str(checkpoint), "--text", str(text)]
    arguments += ["--out", str(tmp_path / "statistics")]
    assert main([*arguments, "--quantization-encoding", "bfloat16"]) == 1
    error = capsys.readouterr().err
    assert f"{checkpoint} on cpu in bfloat16: expected what MAX can run" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "statistics").exists()


def test_a_checkpoint_without_a_tokenizer_is_refused(
    checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((checkpoint / name).read_bytes())
    arguments = ["calibrate", str(bare), "--text", str(text)]
    assert main([*arguments, "--out", str(tmp_path / "statistics")]) == 1
    assert f"{bare}: tokenizer: expected one of" in capsys.readouterr().err


@pytest.mark.parametrize(("add_bos", "start"), [(True, (BOS,)), (False, ())])
def test_windows_begin_as_the_tokenizer_begins_a_text(
    tmp_path: Path, add_bos: bool, start: tuple[int, ...]
) -> None:
    from attnquant.serving.tokens import Encoder

    encoder = Encoder(write_tiny_checkpoint(tmp_path / "tiny", add_bos=add_bos))
    assert encoder.start == start
    tokens = encoder.encode(TEXT)
    assert BOS not in tokens
    tokenizer = Tokenizer.from_file(str(tmp_path / "tiny" / "tokenizer.json"))
    assert tokens == tokenizer.encode(TEXT, add_special_tokens=False).ids
