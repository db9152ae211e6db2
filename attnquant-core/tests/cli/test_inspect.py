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
    first, second, header, *rows = done.out.splitlines()
    assert first.startswith(f"{bundle}: TinyForCausalLM, a theta bundle of ")
    assert second == (
        "4 layers in 2 bands, rank 3, float32, method mean-svd, made from model"
    )
    assert header.split() == ["family", "rank", "size", "relative", "error"]
    assert [*SHAPES, "everything"] == [row.split()[0] for row in rows]


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
    assert json.loads(done.out)["shared_blocks"] == 2


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
        assert row.split() == ["v_proj", "0", "0", "B", "-"]


def test_a_standard_checkpoint_is_no_bundle(run: Run, tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model")
    error = run("inspect", path).error()
    assert error.startswith(f'{path / "config.json"}: expected an "attnquant" block')
    assert error.endswith("Make a bundle with `attnquant decompose`.")


def test_a_directory_that_is_not_there(run: Run, tmp_path: Path) -> None:
    error = run("inspect", tmp_path / "absent").error()
    assert error.startswith(f"{tmp_path / 'absent'}: expected a checkpoint directory")


def test_a_newer_format(run: Run, bundle: Path) -> None:
    edit_json(bundle / "config.json", ["attnquant", "format_version"], 2)
    error = run("inspect", bundle).error()
    assert "format_version: expected a format from 1 to 1, found 2" in error


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
