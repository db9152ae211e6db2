"""`export --to dense`: a plain checkpoint with W_eff under the source's own names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attnquant.errors import CheckpointError, SettingError
from attnquant.export.dense import export_dense
from attnquant.theta.bundle import Bundle, open_bundle
from attnquant.theta.checkpoint import open_checkpoint
from attnquant.theta.prefix_map import PrefixMap
from core_support.bundles import write_tiny_bundle
from core_support.tiny import (
    SHAPES,
    Array,
    Weights,
    assert_same_bits,
    read_json,
    read_weights,
    tiny_config,
    tiny_weights,
    weight_name,
    write_checkpoint,
)


def effective(theta: Weights, layer: int, family: str) -> Array:
    """Compute ``W0 + U diag(s) V`` in float64; of five layers, three bands."""
    base = theta[f"W0.{layer * 3 // 5}.{family}"].astype(np.float64)
    names = [f"layers.{layer}.{family}.{factor}" for factor in "UsV"]
    if names[0] not in theta:
        return base
    u, s, v = (theta[name].astype(np.float64) for name in names)
    return np.asarray(base + (u * s) @ v)


def test_at_passthrough_it_is_the_source_bit_for_bit(
    model: Path, passthrough: Bundle, prefix_map: PrefixMap, tmp_path: Path
) -> None:
    size = export_dense(passthrough, prefix_map, tmp_path / "out")
    weights = read_weights(tmp_path / "out")
    assert_same_bits(read_weights(model), weights)
    assert size == sum(array.nbytes for array in weights.values())


def test_every_projection_is_its_effective_weight(
    model: Path, shared: Bundle, prefix_map: PrefixMap, tmp_path: Path
) -> None:
    export_dense(shared, prefix_map, tmp_path / "out")
    weights, source = read_weights(tmp_path / "out"), read_weights(model)
    theta = read_weights(shared.checkpoint.path)
    assert sorted(weights) == sorted(source)
    changed = 0
    for layer in range(5):
        for family in SHAPES:
            found = weights.pop("model." + weight_name(layer, family))
            expected = effective(theta, layer, family)
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
            original = source.pop("model." + weight_name(layer, family))
            changed += not np.array_equal(found, original)
    assert changed == 4 * len(SHAPES)
    assert_same_bits(source, weights)


def test_config_and_side_files_are_the_source_s(
    model: Path, shared: Bundle, prefix_map: PrefixMap, tmp_path: Path
) -> None:
    export_dense(shared, prefix_map, tmp_path / "out")
    assert read_json(tmp_path / "out/config.json") == read_json(model / "config.json")
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    record = read_json(tmp_path / "out/attnquant_export.json")
    assert (record["form"], record["bundle"]) == ("dense", "bundle")
    assert record["of"]["source"]["name"] == "model"


def test_a_dtype_can_be_asked_for(
    shared: Bundle, prefix_map: PrefixMap, tmp_path: Path
) -> None:
    for dtype in ("float32", "bfloat16"):
        export_dense(shared, prefix_map, tmp_path / dtype, dtype=dtype)
    exact, rounded = (read_weights(tmp_path / d) for d in ("float32", "bfloat16"))
    for name, array in exact.items():
        projection = ".self_attn." in name or ".mlp." in name
        target = rounded[name].dtype if projection else array.dtype
        assert str(rounded[name].dtype) == ("bfloat16" if projection else "float32")
        np.testing.assert_array_equal(array.astype(target), rounded[name])


@pytest.mark.parametrize("shard_bytes", [1, 3000])
def test_large_exports_have_several_files_and_an_index(
    shared: Bundle, prefix_map: PrefixMap, tmp_path: Path, shard_bytes: int
) -> None:
    export_dense(shared, prefix_map, tmp_path / "one")
    export_dense(shared, prefix_map, tmp_path / "many", shard_bytes=shard_bytes)
    opened = open_checkpoint(tmp_path / "many")  # which checks index and files
    assert len(opened.shards) > 5
    assert_same_bits(read_weights(tmp_path / "one"), read_weights(tmp_path / "many"))


def test_progress_counts_every_tensor(
    shared: Bundle, prefix_map: PrefixMap, tmp_path: Path
) -> None:
    steps: list[tuple[str, int, int]] = []
    export_dense(
        shared, prefix_map, tmp_path / "out", progress=lambda *s: steps.append(s)
    )
    total = len(read_weights(tmp_path / "out"))
    assert [step[1:] for step in steps] == [(n, total) for n in range(1, total + 1)]


def test_only_an_export_is_replaced(
    model: Path, shared: Bundle, prefix_map: PrefixMap, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    export_dense(shared, prefix_map, out)
    with pytest.raises(SettingError, match="expected a directory that does not exist"):
        export_dense(shared, prefix_map, out)
    export_dense(shared, prefix_map, out, overwrite=True)
    with pytest.raises(SettingError, match="expected an earlier export"):
        export_dense(shared, prefix_map, model, overwrite=True)
    assert (model / "model.safetensors").exists()
    with pytest.raises(SettingError, match="does not hold the checkpoint"):
        export_dense(shared, prefix_map, tmp_path, overwrite=True)


def test_a_failed_export_leaves_nothing(
    shared: Bundle, prefix_map: PrefixMap, tmp_path: Path
) -> None:
    def fail(_: str, done: int, total: int) -> None:
        if done == total // 2:
            raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        export_dense(shared, prefix_map, tmp_path / "out", progress=fail)
    assert sorted(tmp_path.iterdir()) == before


def test_what_a_dtype_cannot_hold_is_refused(
    prefix_map: PrefixMap, tmp_path: Path
) -> None:
    weights = tiny_weights(2)
    name = weight_name(1, "o_proj")
    # The largest float32 number rounds up to infinity in bfloat16.
    weights[name][0, 0] = np.finfo(np.float32).max
    write_checkpoint(tmp_path / "wide" / "model", weights, tiny_config(2))
    bundle = open_bundle(write_tiny_bundle(tmp_path / "wide", 2, rank=None).path)
    with pytest.raises(CheckpointError, match=f"{name} in bfloat16: expected finite"):
        export_dense(bundle, prefix_map, tmp_path / "out", dtype="bfloat16")
    assert not (tmp_path / "out").exists()
