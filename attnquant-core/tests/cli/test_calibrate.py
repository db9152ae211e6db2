"""`attnquant calibrate`, `merge-statistics`: what is written. The model is a fake."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from attnquant import texts
from attnquant.cli import calibrate
from attnquant.evaluation.windows import Tokens, Windows, cut
from attnquant.theta.statistics import InputKey, open_statistics
from core_support.processes import Run

KEY = InputKey(0, "qkv")


class Fake:
    """A model whose one input is a table's row for each token."""

    table = np.random.default_rng(0).standard_normal((9, 4)).astype(np.float32)

    def inputs(self, tokens: Sequence[int]) -> Mapping[InputKey, npt.NDArray[Any]]:
        return {KEY: self.table[list(tokens)]}


def body_of(text: texts.Text) -> tuple[int, ...]:
    """Stand in for a tokenizer: bytes, modulo the fake's vocabulary."""
    return tuple(byte % 9 for byte in text.content.encode()[:400])


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put fakes in the place of MAX; give the names of the texts that were used."""
    names: list[str] = []

    def windows_of(options: Any, _: Path, given: Sequence[texts.Text]) -> Windows:
        names.extend(text.name for text in given)
        tokens = [Tokens(text, (), body_of(text)) for text in given]
        return cut(tokens, options.window, options.tokens)

    monkeypatch.setattr(calibrate, "load", lambda *_: Fake())
    monkeypatch.setattr(calibrate, "windows_of", windows_of)
    return names


@pytest.fixture
def mine(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "one.txt", tmp_path / "two.txt"]
    paths[0].write_text("The first of two texts, and the longer one.")
    paths[1].write_text("The other.")
    return paths


def test_the_default_text_is_the_one_that_ships(
    run: Run, model: Path, asked: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "statistics"
    done = run("calibrate", model, "--out", out)
    assert (done.code, done.err) == (0, "")
    assert asked == [texts.CALIBRATION]
    statistics = open_statistics(out)
    (text,) = statistics.texts
    shipped = texts.calibration_text()
    assert (text.name, text.sha256) == (shipped.name, shipped.sha256)
    assert dict(statistics.tokens) == {KEY: 400}
    rows = Fake.table[list(body_of(shipped))].astype(np.float64)
    moment = statistics.moment(KEY)
    np.testing.assert_allclose(moment, rows.T @ rows / 400, rtol=1e-5, atol=1e-6)


def test_the_statistics_know_their_checkpoint(
    run: Run, model: Path, mine: list[Path], tmp_path: Path
) -> None:
    from attnquant.theta.checkpoint import open_checkpoint
    from attnquant.theta.statistics import describe_source

    run("calibrate", model, "--text", *mine, "--out", tmp_path / "statistics")
    statistics = open_statistics(tmp_path / "statistics")
    assert statistics.model == describe_source(open_checkpoint(model))
    assert [text.name for text in statistics.texts] == ["one.txt", "two.txt"]


def test_the_json_says_what_was_collected(
    run: Run, model: Path, mine: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "statistics"
    done = run("calibrate", model, "--text", *mine, "--out", out, "--json")
    shown = json.loads(done.out)
    assert shown.pop("seconds") >= 0
    assert shown == {
        "statistics": str(out),
        "checkpoint": "model",
        "texts": [
            {
                "name": path.name,
                "sha256": texts.read_text(path).sha256,
                "tokens": len(path.read_text()),
            }
            for path in mine
        ],
        "inputs": 1,
        "bytes": out.stat().st_size,
    }


def test_merged_parts_are_as_if_collected_in_one_go(
    run: Run, model: Path, mine: list[Path], tmp_path: Path
) -> None:
    whole, merged = tmp_path / "whole", tmp_path / "merged"
    run("calibrate", model, "--text", *mine, "--out", whole)
    parts = [tmp_path / path.stem for path in mine]
    for path, part in zip(mine, parts, strict=True):
        run("calibrate", model, "--text", path, "--out", part)
    done = run("merge-statistics", *parts, "--out", merged)
    assert done.code == 0, done.err
    expected, found = open_statistics(whole), open_statistics(merged)
    assert (found.texts, found.tokens) == (expected.texts, expected.tokens)
    np.testing.assert_allclose(found.moment(KEY), expected.moment(KEY), rtol=1e-6)


def test_an_existing_file_is_replaced_only_if_asked(
    run: Run, model: Path, mine: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "statistics"
    out.write_text("precious")
    command = ("calibrate", model, "--text", mine[0], "--out", out)
    error = run(*command).error()
    assert error.startswith(f"{out}: expected a file that does not exist yet")
    assert out.read_text() == "precious"
    assert run(*command, "--overwrite").code == 0
    assert open_statistics(out).texts[0].name == "one.txt"


@pytest.mark.parametrize("place", ["", "absent/statistics"], ids=["directory", "none"])
def test_a_place_that_cannot_be_written_to(
    run: Run, model: Path, mine: list[Path], tmp_path: Path, place: str
) -> None:
    out = tmp_path / place
    command = ("calibrate", model, "--text", mine[0], "--out", out, "--overwrite")
    assert run(*command).error().startswith(f"{out}: expected a file")


def test_a_bundle_is_not_calibrated(
    run: Run, model: Path, mine: list[Path], tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    run("decompose", model, "--out", bundle, "--blocks", 2, "--rank", 3)
    out = tmp_path / "statistics"
    error = run("calibrate", bundle, "--text", mine[0], "--out", out).error()
    assert error.endswith("Calibrate on the checkpoint that it was made from.")
    assert not out.exists()


def test_a_text_that_is_not_there(run: Run, model: Path, tmp_path: Path) -> None:
    command = ("calibrate", model, "--text", tmp_path / "absent.txt")
    error = run(*command, "--out", tmp_path / "statistics").error()
    assert error.startswith(f"{tmp_path / 'absent.txt'}: expected a text file in UTF-8")
