"""`attnquant export`: from the command line, in both forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core_support.processes import Run
from core_support.tiny import assert_same_bits, read_weights


@pytest.fixture
def bundle(run: Run, model: Path, tmp_path: Path) -> Path:
    done = run("decompose", model, "--out", tmp_path / "b", "--blocks", 2, "--rank", 3)
    assert done.code == 0, done.err
    return tmp_path / "b"


def test_a_passthrough_bundle_comes_back_as_it_was(
    run: Run, model: Path, tmp_path: Path
) -> None:
    run("decompose", model, "--out", tmp_path / "b", "--blocks", 4)
    done = run("export", tmp_path / "b", "--to", "dense", "--out", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    weights = read_weights(model)
    assert_same_bits(weights, read_weights(tmp_path / "out"))
    size = sum(array.nbytes for array in weights.values())
    assert done.out == f"{tmp_path / 'out'}: dense, {size / 1000:.1f} kB\n"


@pytest.mark.parametrize("form", ["dense", "peft"])
def test_the_json_says_what_was_written(
    run: Run, bundle: Path, tmp_path: Path, form: str
) -> None:
    out = tmp_path / "out"
    done = run("export", bundle, "--to", form, "--out", out, "--json")
    shown = json.loads(done.out)
    written = [read_weights(file.parent) for file in out.rglob("*.safetensors")]
    size = sum(array.nbytes for part in written for array in part.values())
    assert shown == {"out": str(out), "form": form, "bytes": size}


def test_a_dtype_has_no_meaning_for_an_adapter(
    run: Run, bundle: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = run("export", bundle, "--to", "peft", "--out", out, "--dtype", "float32")
    assert done.error().startswith("--dtype: expected nothing with --to peft")
    assert not out.exists()


def test_a_checkpoint_is_no_bundle(run: Run, model: Path, tmp_path: Path) -> None:
    done = run("export", model, "--to", "dense", "--out", tmp_path / "out")
    assert 'expected an "attnquant" block (a theta bundle)' in done.error()
