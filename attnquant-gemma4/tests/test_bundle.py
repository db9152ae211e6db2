"""Bundles of Gemma 4: names, what they rebuild, what they keep and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from attnquant.errors import CheckpointError
from attnquant.testing.checkpoints import digest, read_checkpoint
from attnquant.testing.parity import LIMIT, make_bundle, make_plan
from attnquant.theta.bundle import open_bundle
from attnquant.theta.decompose import reconstruct
from gemma4_support import golden
from gemma4_support.oracle import forward
from gemma4_support.tiny import write_tiny_checkpoint

GOLDEN: Final = golden.load(Path(__file__).parent / "golden" / "tiny.npz")
SHARED: Final = golden.Setting("g4-r4-all", 4, 4)
DECOMPOSED: Final = [
    ("pattern", "g4-r4-all"),
    ("irregular", "g3-r8-attn"),
    ("experts", "g2-r4-all"),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def change(
    checkpoint: Path,
    out: Path,
    *,
    add: dict[str, npt.NDArray[Any]] | None = None,
    drop: str | None = None,
) -> Path:
    """Copy a checkpoint with tensors added or dropped."""
    out.mkdir()
    tensors = load_file(checkpoint / "model.safetensors") | (add or {})
    if drop is not None:
        del tensors[drop]
    save_file(tensors, out / "model.safetensors")
    (out / "config.json").write_text((checkpoint / "config.json").read_text())
    return out


def test_bases_are_named_by_band_kind_and_family(
    checkpoint: Path, tmp_path: Path
) -> None:
    bundle = make_bundle(checkpoint, SHARED, tmp_path / "bundle")
    names = set(read_checkpoint(bundle)[0])
    assert {name for name in names if name.startswith("W0.")} == {
        *(
            f"W0.{band}.sliding_attention.{family}"
            for band in (0, 1, 2)
            for family in ("q_proj", "k_proj", "v_proj", "o_proj")
        ),
        *(f"W0.3.full_attention.{family}" for family in ("q_proj", "k_proj", "o_proj")),
        *(
            f"W0.{band}.{family}"
            for band in range(4)
            for family in ("gate_proj", "up_proj", "down_proj")
        ),
    }
    # Layers 2 and 5 have bands of their own.
    factors = {name.rsplit(".", 1)[0] for name in names if name.endswith(".U")}
    assert {name.split(".")[1] for name in factors} == {"0", "1", "3", "4"}
    assert len(factors) == 4 * 7
    assert {"embed_tokens.weight", "layers.5.layer_scalar", "norm.weight"} <= names


def test_one_band_has_a_base_for_each_kind(checkpoint: Path, tmp_path: Path) -> None:
    setting = golden.Setting("g1-r4-attn", 1, 4, "attn")
    names = read_checkpoint(make_bundle(checkpoint, setting, tmp_path / "bundle"))[0]
    assert {name for name in names if name.endswith("q_proj") and "W0" in name} == {
        "W0.0.sliding_attention.q_proj",
        "W0.0.full_attention.q_proj",
    }


@pytest.mark.parametrize(("source", "setting"), DECOMPOSED)
def test_a_bundle_rebuilds_the_weights_that_were_recorded(
    tmp_path: Path, source: str, setting: str
) -> None:
    records = GOLDEN.of(source, setting)
    original = write_tiny_checkpoint(
        tmp_path / "original", **GOLDEN.source(source).recipe
    )
    path = make_bundle(original, records[0].setting, tmp_path / "bundle")
    bundle = open_bundle(path)
    weights, config = read_checkpoint(original)
    rebuilt = reconstruct(bundle.checkpoint.tensors, bundle.info.layout)
    for name, matrix in rebuilt.items():
        assert f"model.language_model.{name}" in weights
        weights[f"model.language_model.{name}"] = matrix
    for record in records:
        found = golden.compare(record, forward(weights, config, record.tokens))
        assert max(found) < LIMIT


@pytest.mark.parametrize("wrapper", ["model.", "language_model.model."])
def test_how_the_wrapper_names_its_decoder_makes_no_difference(
    checkpoint: Path, tmp_path: Path, wrapper: str
) -> None:
    other = write_tiny_checkpoint(tmp_path / "other", wrapper=wrapper)
    bundles = [
        make_bundle(checkpoint, SHARED, tmp_path / "a"),
        make_bundle(other, SHARED, tmp_path / "b"),
    ]
    digests = {digest(read_checkpoint(bundle)[0]) for bundle in bundles}
    assert len(digests) == 1


def test_towers_and_experts_are_kept_untouched(tmp_path: Path) -> None:
    name = "vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight"
    tower = np.arange(12, dtype=np.float32).reshape(3, 4)
    recipe = GOLDEN.source("experts").recipe
    original = write_tiny_checkpoint(
        tmp_path / "original", extra={f"model.{name}": tower}, **recipe
    )
    setting = golden.Setting("g2-r4-all", 2, 4)
    before, _ = read_checkpoint(original)
    after, _ = read_checkpoint(make_bundle(original, setting, tmp_path / "bundle"))
    np.testing.assert_array_equal(after[name], tower)
    kept = [key for key in before if "experts." in key or "router." in key]
    assert len(kept) == 3 * 5
    for key in kept:
        np.testing.assert_array_equal(
            after[key.removeprefix("model.language_model.")], before[key]
        )
    assert "W0.0.up_proj" in after


def test_the_unified_line_is_decomposed_alike(checkpoint: Path, tmp_path: Path) -> None:
    unified = write_tiny_checkpoint(tmp_path / "unified", unified=True)
    plan = make_plan(unified, SHARED)
    assert plan.layout == make_plan(checkpoint, SHARED).layout


# --- what is refused -------------------------------------------------------------


def test_a_value_projection_that_must_be_absent_is_named(
    checkpoint: Path, tmp_path: Path
) -> None:
    name = "model.language_model.layers.5.self_attn.v_proj.weight"
    extra = {name: np.zeros((64, 96), dtype=np.float32)}
    broken = change(checkpoint, tmp_path / "broken", add=extra)
    message = r"layers\.5\.self_attn\.v_proj\.weight: expected no such tensor"
    with pytest.raises(CheckpointError, match=message):
        make_plan(broken, SHARED)


@pytest.mark.parametrize("layer", [0, 5])
def test_a_projection_that_is_missing_is_named(
    checkpoint: Path, tmp_path: Path, layer: int
) -> None:
    family = "v_proj" if layer == 0 else "k_proj"
    name = f"layers.{layer}.self_attn.{family}.weight"
    broken = change(
        checkpoint, tmp_path / "broken", drop=f"model.language_model.{name}"
    )
    with pytest.raises(CheckpointError, match=name):
        make_plan(broken, SHARED)


def test_full_layers_need_values_where_keys_are_none(tmp_path: Path) -> None:
    original = write_tiny_checkpoint(tmp_path / "original")
    config = json.loads((original / "config.json").read_text())
    config["text_config"]["attention_k_eq_v"] = False
    (original / "config.json").write_text(json.dumps(config))
    message = r"layers\.5\.self_attn\.v_proj\.weight: .* found no such tensor"
    with pytest.raises(CheckpointError, match=message):
        make_plan(original, SHARED)


def test_a_layer_that_is_called_by_the_wrong_kind_does_not_fit(tmp_path: Path) -> None:
    original = write_tiny_checkpoint(tmp_path / "original", attention_k_eq_v=False)
    config = json.loads((original / "config.json").read_text())
    config["text_config"]["layer_types"][1] = "full_attention"
    (original / "config.json").write_text(json.dumps(config))
    setting = golden.Setting("g1-r4-all", 1, 4)
    message = r"layers\.5\.self_attn\.q_proj\.weight: expected shape .* as layers\.1\."
    with pytest.raises(CheckpointError, match=message):
        make_plan(original, setting)
