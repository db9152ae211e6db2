"""`attnquant decompose`: bad input gives one line, exit code 1 and no bundle."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from attnquant.theta import writer
from core_support.bundles import write_tiny_bundle
from core_support.plugins import TINY_PLUGIN, install, supplying
from core_support.processes import Run
from core_support.tiny import (
    edit_json,
    tiny_config,
    tiny_weights,
    weight_name,
    write_checkpoint,
    write_tiny_checkpoint,
)


def refused(run: Run, model: Path, *options: object) -> str:
    """Check that nothing is written, and return the error's line."""
    out = model.parent / "bundle"
    before = sorted(model.parent.iterdir())
    done = run("decompose", model, "--out", out, *(options or ("--blocks", 4)))
    assert before == sorted(model.parent.iterdir())
    return done.error()


@pytest.mark.parametrize("blocks", [0, -1, 5])
def test_blocks_out_of_bounds(run: Run, model: Path, blocks: int) -> None:
    error = refused(run, model, f"--blocks={blocks}", "--rank=3")
    assert error == (
        "--blocks: expected an integer from 1 to 4 (the number of layers),"
        f" found {blocks}"
    )


@pytest.mark.parametrize("rank", [0, -1])
@pytest.mark.parametrize("blocks", [2, 4])
def test_a_rank_that_is_not_positive(
    run: Run, model: Path, rank: int, blocks: int
) -> None:
    error = refused(run, model, f"--blocks={blocks}", f"--rank={rank}")
    assert error == f"--rank: expected a positive integer, found {rank}"


@pytest.mark.parametrize("blocks", [2, 4])
def test_a_rank_above_every_full_rank(run: Run, model: Path, blocks: int) -> None:
    error = refused(run, model, f"--blocks={blocks}", "--rank=13")
    assert error.startswith("--rank: expected at most 12")
    assert error.endswith("found 13")


def test_a_rank_that_is_needed_and_not_given(run: Run, model: Path) -> None:
    error = refused(run, model, "--blocks=2")
    assert error == "--rank: expected a positive integer, found nothing"


@pytest.mark.parametrize(
    "option",
    [
        "--rank=two",
        "--rank=2.5",
        "--rank=",
        "--rank=True",
        "--blocks=two",
        "--blocks=2.0",
        "--tie=mlp",
        "--dtype=float16",
        "--shard-size=1e9x",
    ],
)
def test_what_is_no_number_or_choice_is_wrong_usage(
    run: Run, model: Path, option: str
) -> None:
    out = model.parent / "bundle"
    done = run("decompose", model, "--out", out, "--blocks=2", option)
    assert (done.code, done.out) == (2, "")
    assert f"argument {option.partition('=')[0]}" in done.err
    assert "Traceback" not in done.err
    assert not out.exists()


@pytest.mark.parametrize("size", [0, -1])
def test_a_shard_size_that_is_not_positive(run: Run, model: Path, size: int) -> None:
    error = refused(run, model, "--blocks=4", f"--shard-size={size}")
    assert error == f"--shard-size: expected a positive number, found {size}"


def test_a_checkpoint_that_is_not_there(run: Run, model: Path) -> None:
    absent = model.with_name("absent")
    assert refused(run, absent) == (
        f"{absent}: expected a checkpoint directory with config.json and safetensors,"
        " found nothing"
    )


def test_a_truncated_file(run: Run, model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    error = refused(run, model)
    assert error.startswith(f"{file}: expected a whole safetensors file, found ")


def test_a_config_that_is_not_json(run: Run, model: Path) -> None:
    (model / "config.json").write_text("{")
    error = refused(run, model)
    assert error.startswith(f"{model / 'config.json'}: expected a JSON file, found ")


def test_an_absent_shard(run: Run, model: Path) -> None:
    sharded = write_tiny_checkpoint(model.with_name("sharded"), shards=2)
    shard = sharded / "model-00002-of-00002.safetensors"
    shard.unlink()
    assert str(shard) in refused(run, sharded)


def test_a_bundle_in_place_of_a_checkpoint(run: Run, model: Path) -> None:
    write_tiny_bundle(model.parent)
    bundle = (model.parent / "bundle").rename(model.parent / "made")
    assert refused(run, bundle) == (
        f"{bundle}: expected a standard checkpoint, found a theta bundle."
        " Decompose the checkpoint that it was made from."
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_tensor_that_is_not_finite(run: Run, model: Path, value: float) -> None:
    weights = tiny_weights(4)
    weights[weight_name(1, "k_proj")][2, 7] = value
    path = write_checkpoint(model.with_name("bad"), weights, tiny_config(4))
    assert refused(run, path) == (
        f"{weight_name(1, 'k_proj')}: expected finite values only,"
        f" found {value} at [2, 7]"
    )


def test_a_missing_projection(run: Run, model: Path) -> None:
    weights = tiny_weights(4)
    del weights[weight_name(1, "k_proj")]
    path = write_checkpoint(model.with_name("bad"), weights, tiny_config(4))
    assert refused(run, path) == (
        f"{weight_name(1, 'k_proj')}: expected a projection in each of 4 layers,"
        " found no such tensor"
    )


def test_a_tensor_that_nothing_maps(run: Run, model: Path) -> None:
    path = write_tiny_checkpoint(model.with_name("bad"), prefix="decoder.")
    error = refused(run, path)
    assert error.startswith("decoder.embed_tokens.weight: expected a tensor name")


def test_an_unknown_architecture(run: Run, model: Path) -> None:
    edit_json(model / "config.json", ["architectures"], ["OtherForCausalLM"])
    error = refused(run, model)
    assert error.startswith(
        "OtherForCausalLM: expected one of TinyForCausalLM, found an architecture"
    )


@pytest.mark.parametrize(
    "trouble",
    [
        "raise ValueError('one\\ntwo')",
        "import no_such_package",
        supplying("OtherForCausalLM", api_version=2),
        supplying("OtherForCausalLM") + "\n@hookimpl\ndef attnquant_kv_params(x): ...",
        supplying("OtherForCausalLM") + "\n@hookimpl\ndef attnquant_kv_parms(): ...",
    ],
    ids=["import", "dependency", "version", "signature", "misspelled"],
)
def test_an_architecture_whose_plugin_is_in_trouble(
    run: Run, home: Path, model: Path, trouble: str
) -> None:
    install(home, "other", trouble)
    edit_json(model / "config.json", ["architectures"], ["OtherForCausalLM"])
    assert "Plugin other (attnquant-other 1.0) is " in refused(run, model)


@pytest.mark.parametrize("hook", ["prefix_map", "w0_group"])
def test_a_hook_that_fails(run: Run, home: Path, model: Path, hook: str) -> None:
    install(
        home,
        "other",
        TINY_PLUGIN.replace("TinyFor", "OtherFor").replace(
            f"{hook}():", f"{hook}(config):\n    config['head_dim']"
        ),
    )
    edit_json(model / "config.json", ["architectures"], ["OtherForCausalLM"])
    error = refused(run, model)
    assert f"plugin other (attnquant-other), hook attnquant_{hook}" in error
    assert error.endswith("found KeyError: 'head_dim'")


def test_a_malformed_variable(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNQUANT_PIN", "x")
    assert refused(run, model).startswith("ATTNQUANT_PIN: expected architecture=")


def test_a_full_disk(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer, "ShardWriter", full)
    error = refused(run, model)
    assert error.startswith(f"{model.parent / 'bundle'}: expected to write a bundle")
    assert "No space left on device" in error


def test_a_target_that_exists(run: Run, model: Path) -> None:
    (model.parent / "bundle").mkdir()
    error = refused(run, model)
    assert error.startswith(f"{model.parent / 'bundle'}: expected a directory that")
    assert "--overwrite" in error


@pytest.mark.parametrize("out", ["model", "."])
def test_a_target_that_holds_the_checkpoint(run: Run, model: Path, out: str) -> None:
    target = model.parent / out
    done = run("decompose", model, "--out", target, "--blocks=4", "--overwrite")
    assert "that does not hold the checkpoint" in done.error()
    assert (model / "model.safetensors").exists()


def test_overwrite_replaces_nothing_but_bundles(run: Run, model: Path) -> None:
    precious = model.parent / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("do not lose me")
    done = run("decompose", model, "--blocks=4", f"--out={precious}", "--overwrite")
    assert done.code == 1
    assert "expected a theta bundle, or an empty directory" in done.err
    assert (precious / "thesis.txt").read_text() == "do not lose me"
