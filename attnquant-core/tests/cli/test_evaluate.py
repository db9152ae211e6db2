"""`attnquant eval`: what it prints, and when it fails. The model is a fake."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from attnquant import texts
from attnquant.cli import evaluate
from attnquant.evaluation.windows import Tokens, Windows, cut
from core_support.processes import Run
from core_support.tiny import read_weights

VOCABULARY = 9
DEFAULT = texts.held_out_texts()
"""Found here, since a fake site-packages has no metadata of this package."""


class Fake:
    """A model with a table of logits per token, the same for every text."""

    def __init__(self, path: Path) -> None:
        rng = np.random.default_rng(0)
        self.table = rng.standard_normal((VOCABULARY, VOCABULARY)).astype(np.float32)
        if path.name == "bundle":
            self.table *= 0.5

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        return self.table[list(tokens)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put fakes in the place of MAX; give the names of the texts that were used."""
    names: list[str] = []

    def windows_of(options: Any, _: Path, given: Sequence[texts.Text]) -> Windows:
        names.extend(text.name for text in given)
        rng = np.random.default_rng(1)
        body = tuple(map(int, rng.integers(0, VOCABULARY, 60)))
        tokens = [Tokens(text, (2,), body) for text in given]
        return cut(tokens, options.window, options.tokens)

    monkeypatch.setattr(evaluate, "load", lambda _, path: Fake(path))
    monkeypatch.setattr(evaluate, "windows_of", windows_of)
    monkeypatch.setattr(evaluate, "held_out_texts", lambda: DEFAULT)
    return names


@pytest.fixture
def bundle(run: Run, model: Path, tmp_path: Path) -> Path:
    out = tmp_path / "bundle"
    done = run("decompose", model, "--out", out, "--blocks", 2, "--rank", 3)
    assert done.code == 0, done.err
    return out


def command(bundle: Path, model: Path) -> tuple[object, ...]:
    return ("eval", bundle, "--reference", model, "--window", 16)


def test_two_held_out_texts_are_used_by_default(
    run: Run, model: Path, bundle: Path, asked: list[str]
) -> None:
    done = run(*command(bundle, model))
    assert (done.code, done.err) == (0, "")
    assert asked == [texts.HELD_OUT, texts.LICENCE]
    first, header, *rows, legend = done.out.splitlines()
    assert first == f"{bundle} against {model}, which it was made from"
    assert header.split()[:5] == ["text", "tokens", "original", "bundle", "ratio"]
    assert [row.split()[:2] for row in rows] == [[name, "60"] for name in asked]
    assert legend.startswith("original, bundle: perplexities; ")


def test_the_json_has_every_figure(
    run: Run, model: Path, bundle: Path, asked: list[str], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("A text.")
    done = run(*command(bundle, model), "--text", mine, "--tokens", 20, "--json")
    shown = json.loads(done.out)
    assert asked == ["mine.txt"]
    (text,) = shown.pop("texts")
    assert shown.pop("seconds") >= 0
    sizes = [
        sum(array.nbytes for array in read_weights(path).values())
        for path in (bundle, model)
    ]
    assert shown == {
        "bundle": str(bundle),
        "reference": str(model),
        "reference_is_source": True,
        "bundle_bytes": sizes[0],
        "reference_bytes": sizes[1],
        "window": 16,
    }
    assert (text["name"], text["tokens"]) == ("mine.txt", 20)
    assert text["sha256"] == texts.read_text(mine).sha256
    expected = text["perplexity"] / text["reference_perplexity"]
    assert text["ratio"] == pytest.approx(expected)
    assert text["ratio"] != pytest.approx(1.0, abs=0.01)
    assert 0 < text["mean_kl"] <= text["max_kl"]


@pytest.mark.usefixtures("asked")
def test_a_limit_on_the_ratio_sets_the_exit_code(
    run: Run, model: Path, bundle: Path
) -> None:
    ratios = [
        text["ratio"]
        for text in json.loads(run(*command(bundle, model), "--json").out)["texts"]
    ]
    for limit, code in ((max(ratios) * 1.01, 0), (max(ratios) * 0.99, 1)):
        done = run(*command(bundle, model), "--max-ratio", limit)
        assert (done.code, done.err) == (code, "")
        assert "python-topics-held-out" in done.out
    error = run(*command(bundle, model), "--max-ratio", 0).error()
    assert error == "--max-ratio: expected a positive number, found 0.0"


@pytest.mark.usefixtures("asked")
def test_a_reference_that_it_was_not_made_from_is_pointed_out(
    run: Run, model: Path, bundle: Path
) -> None:
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    done = run(*command(bundle, model))
    assert done.code == 0
    assert "which is NOT what it was made from" in done.out.splitlines()[0]


@pytest.mark.usefixtures("asked")
def test_a_checkpoint_can_stand_in_place_of_a_bundle(run: Run, model: Path) -> None:
    done = run("eval", model, "--reference", model, "--json")
    shown = json.loads(done.out)
    assert shown["reference_is_source"] is None
    assert {text["ratio"] for text in shown["texts"]} == {1.0}


@pytest.mark.usefixtures("asked")
def test_numbers_out_of_range_are_named_as_options(
    run: Run, model: Path, bundle: Path
) -> None:
    for arguments, message in (
        (("--window", 1), "--window: expected at least 2, found 1"),
        (("--tokens", 0), "--tokens: expected at least 1, found 0"),
    ):
        assert run(*command(bundle, model), *arguments).error() == message


def test_without_max_it_says_what_to_install(
    run: Run, model: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "held_out_texts", lambda: DEFAULT)
    for name in list(sys.modules):
        if name.startswith("attnquant.serving."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    error = run(*command(bundle, model)).error()
    assert error.startswith("this command: expected MAX")
    assert error.endswith('Install it: pip install "attnquant-core[serving]".')
