"""`attnquant inspect`: checks a bundle and shows what it holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core_support import processes
from core_support.bundles import write_tiny_bundle
from core_support.processes import Run
from core_support.tiny import (
    SHAPES,
    edit_json,
    read_weights,
    tiny_config,
    tiny_weights,
    write_checkpoint,
    write_tiny_checkpoint,
)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_tiny_bundle(tmp_path).path


def test_a_bundle_is_described(run: Run, bundle: Path) -> None:
    done = run("inspect", bundle)
    assert (done.code, done.err) == (0, "")
    first, second, header, *lines = done.out.splitlines()
    rows, rest = lines[: len(SHAPES) + 1], lines[len(SHAPES) + 1 :]
    assert first.startswith(f"{bundle}: TinyForCausalLM, a theta bundle of ")
    assert second == "4 layers in 2 bands, rank 3, float32, method mean-svd"
    assert header.split() == (
        ["family", "bands", "rank", "size", "of", "dense", "error", "output", "error"]
    )
    assert [*SHAPES, "everything"] == [row.split()[0] for row in rows]
    assert rest[0].startswith("made from model (model.safetensors sha256:")
    assert rest[1] == "with no calibration statistics"


def test_families_may_differ_in_bands_and_ranks(
    run: Run, model: Path, tmp_path: Path
) -> None:
    blocks, rank = "3,q_proj=2", "3,q_proj=5"
    command = ("decompose", model, "--out", tmp_path / "b", "--blocks", blocks)
    assert run(*command, "--rank", rank).code == 0
    out = run("inspect", tmp_path / "b").out
    assert "4 layers in up to 3 bands, rank up to 5, float32" in out
    rows = {line.split()[0]: line.split()[1:3] for line in out.splitlines()}
    assert rows["q_proj"] == ["2", "5"]
    assert rows["down_proj"] == ["3", "3"]


def test_sizes_are_compared_with_what_the_projections_would_take(
    run: Run, bundle: Path
) -> None:
    shown = json.loads(run("inspect", bundle, "--json").out)
    for family, (out_dim, in_dim) in SHAPES.items():
        dense = 4 * out_dim * in_dim * 4  # four layers in float32
        # Two bases, and four times U, s and V of rank 3.
        theta = 2 * out_dim * in_dim * 4 + 4 * 3 * (out_dim + 1 + in_dim) * 4
        assert shown["dense_bytes"][family] == dense
        assert shown["bytes"][family] == theta
        row = next(
            line
            for line in run("inspect", bundle).out.splitlines()
            if line.startswith(family)
        )
        assert f"{theta / dense:.0%}" in row.split()


def test_it_says_what_serving_takes(run: Run, tiny_plugin: Path, bundle: Path) -> None:
    assert tiny_plugin.is_dir()
    shown = json.loads(run("inspect", bundle, "--json").out)
    serving = shown["serving"]
    assert serving["plugin"] == "tiny (attnquant-tiny 1.0)"
    assert serving["reason"] == ""
    weights = read_weights(bundle)
    shared = sum(array.size for array in weights.values())
    dense = sum(array.size for array in tiny_weights(4).values())
    assert serving["weights"] == {
        "float32": {"shared": 4 * shared, "dense": 4 * dense},
        "bfloat16": {"shared": 2 * shared, "dense": 2 * dense},
    }
    assert serving["cpu_only_ranks"] == [3]
    out = run("inspect", bundle).out
    assert "served by plugin tiny (attnquant-tiny 1.0)" in out
    assert "ranks that GPUs cannot do, except as dense: 3 " in out


def test_ranks_that_a_gpu_can_do_are_not_complained_of(
    run: Run, tmp_path: Path
) -> None:
    bundle = write_tiny_bundle(tmp_path, blocks=2, rank=8).path
    assert "ranks that GPUs" not in run("inspect", bundle).out
    shown = json.loads(run("inspect", bundle, "--json").out)
    assert shown["serving"]["cpu_only_ranks"] == []


def test_the_json_holds_the_block_and_sizes(run: Run, bundle: Path) -> None:
    shown: dict[str, Any] = json.loads(run("inspect", bundle, "--json").out)
    block = json.loads((bundle / "config.json").read_text())["attnquant"]
    assert block == {name: shown[name] for name in block}
    assert shown["bundle"] == str(bundle)
    assert shown["architecture"] == "TinyForCausalLM"
    weights = read_weights(bundle)
    assert len(weights) == shown["tensors"]
    expected = dict.fromkeys([*SHAPES, "kept"], 0)
    for name, array in weights.items():
        family = next((f for f in SHAPES if f in name), "kept")
        expected[family] += array.nbytes
    assert expected | {"total": sum(expected.values())} == shown["bytes"]


def test_no_plugin_is_needed(bundle: Path) -> None:
    env = processes.environment(ATTNQUANT_PLUGINS="none")
    done = processes.attnquant("inspect", bundle, "--json", env=env)
    assert (done.code, done.err) == (0, "")
    shown = json.loads(done.out)
    assert shown["shared_blocks"] == 2
    assert shown["serving"]["plugin"] is None
    assert "ATTNQUANT_PLUGINS" in shown["serving"]["reason"]


def only_v_in_layer_0(layer: int, family: str) -> str:
    from attnquant.theta.grouping import UNNAMED, NoBase

    absent = family == "v_proj" and layer > 0
    dense = family == "v_proj" and layer == 0
    return NoBase.ABSENT if absent else NoBase.DENSE if dense else UNNAMED


@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_a_family_without_a_base_has_no_error_to_show(
    run: Run, tmp_path: Path, form: list[str]
) -> None:
    weights = {
        name: array
        for name, array in tiny_weights(4).items()
        if "v_proj" not in name or "layers.0" in name
    }
    write_checkpoint(tmp_path / "model", weights, tiny_config(4))
    bundle = write_tiny_bundle(tmp_path, grouping=only_v_in_layer_0).path
    done = run("inspect", bundle, *form)
    assert (done.code, done.err) == (0, "")
    if not form:
        row = next(r for r in done.out.splitlines() if r.startswith("v_proj"))
        assert row.split() == ["v_proj", "-", "0", "0", "B", "-", "-", "-"]


def test_a_standard_checkpoint_is_no_bundle(run: Run, tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model")
    error = run("inspect", path).error()
    assert error.startswith(f'{path / "config.json"}: expected an "attnquant" block')
    assert error.endswith("Make a bundle with `attnquant decompose`.")


def test_a_directory_that_is_not_there(run: Run, tmp_path: Path) -> None:
    error = run("inspect", tmp_path / "absent").error()
    assert error.startswith(f"{tmp_path / 'absent'}: expected a checkpoint directory")


def test_a_newer_format(run: Run, bundle: Path) -> None:
    edit_json(bundle / "config.json", ["attnquant", "format_version"], 99)
    error = run("inspect", bundle).error()
    assert "format_version: expected a format from 1 to 2, found 99" in error


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["kept"], {}),
        (["groups", "q_proj"], []),
        (["shapes", "q_proj", ""], [16, 13]),
        (["layer_to_band"], None),
        (["dtype"], "bfloat16"),
    ],
)
def test_a_damaged_block(
    run: Run, bundle: Path, keys: list[str], value: object
) -> None:
    edit_json(bundle / "config.json", ["attnquant", *keys], value)
    assert run("inspect", bundle).error()


def test_a_truncated_shard(run: Run, bundle: Path) -> None:
    shard = bundle / "model-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert run("inspect", bundle).error().startswith(f"{shard}: expected a whole")
