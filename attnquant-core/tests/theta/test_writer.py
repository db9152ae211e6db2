"""Writing a bundle: what is read back is what was computed, bit for bit."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnquant.theta import (
    decompose_standard_state_dict_to_attnquant,
    reconstruct,
    relative_frobenius_error,
)
from attnquant.theta.bundle import open_bundle
from attnquant.theta.checkpoint import RenamedTensors, open_checkpoint
from attnquant.theta.prefix_map import PrefixMap
from attnquant.theta.writer import write_bundle
from core_support.bundles import plan, write_tiny_bundle
from core_support.tiny import (
    BFLOAT16,
    assert_same_bits,
    edit_json,
    finite_bfloat16,
    read_json,
    read_weights,
    tiny_config,
    tiny_weights,
    weight_name,
    write_checkpoint,
    write_tiny_checkpoint,
)

decompose = decompose_standard_state_dict_to_attnquant


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
@pytest.mark.parametrize("tie", ["all", "attn"])
@pytest.mark.parametrize(("blocks", "rank"), [(1, 1), (3, 4), (4, 12), (5, None)])
def test_a_bundle_holds_the_theta_computed_in_memory(
    tmp_path: Path, dtype: np.dtype, tie: str, blocks: int, rank: int | None
) -> None:
    weights = tiny_weights(5, dtype=dtype)
    write_checkpoint(tmp_path / "model", weights, tiny_config(5))
    write_tiny_bundle(tmp_path, blocks=blocks, rank=rank, tie_families=tie)
    expected = decompose(weights, rank, blocks, tie_families=tie)
    assert_same_bits(expected, open_bundle(tmp_path / "bundle").checkpoint.tensors)


def test_a_lazily_read_checkpoint_is_a_state_dict_too(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model", shards=3)
    tensors = open_checkpoint(path).tensors
    sources = {name: "model." + name for name in tiny_weights(4)}
    assert_same_bits(
        decompose(tiny_weights(4), 3, 2),
        decompose(RenamedTensors(tensors, sources), 3, 2),
    )


def test_every_finite_bfloat16_survives_in_base_and_kept_tensor(tmp_path: Path) -> None:
    weights = tiny_weights(2, dtype=BFLOAT16) | {
        "every": finite_bfloat16(),
        **{weight_name(layer, "q_proj"): finite_bfloat16() for layer in range(2)},
    }
    write_checkpoint(tmp_path / "model", weights, tiny_config(2))
    write_tiny_bundle(tmp_path, blocks=2, rank=None)
    found = read_weights(tmp_path / "bundle")
    expected = dict.fromkeys(["every", "W0.0.q_proj"], finite_bfloat16())
    assert_same_bits(expected, {name: found[name] for name in expected})


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "?"])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 5)])
def test_a_kept_tensor_keeps_its_dtype_shape_and_bits(
    tmp_path: Path, dtype: str, shape: tuple[int, ...]
) -> None:
    buffer = np.ones(shape, dtype)
    weights = tiny_weights(1) | {"buffer": buffer}
    write_checkpoint(tmp_path / "model", weights, tiny_config(1))
    write_tiny_bundle(tmp_path, blocks=1, rank=None)
    found = open_bundle(tmp_path / "bundle").checkpoint.tensors["buffer"]
    assert_same_bits({"buffer": buffer}, {"buffer": found})


@pytest.mark.parametrize("shard_bytes", [1, 500, 3000, 10**9])
def test_sharding_changes_no_tensor(tmp_path: Path, shard_bytes: int) -> None:
    path = write_tiny_checkpoint(tmp_path / "model")
    out = tmp_path / "bundle"
    written = write_bundle(plan(path), out, shard_bytes=shard_bytes)
    tensors = open_bundle(out).checkpoint.tensors
    assert_same_bits(decompose(tiny_weights(4), 3, 2), tensors)
    index = read_json(out / "model.safetensors.index.json")
    size = sum(array.nbytes for array in tensors.values())
    assert size == index["metadata"]["total_size"] == written.bundle_bytes


def test_shards_are_numbered_and_no_larger_than_asked(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model")
    write_bundle(plan(path), tmp_path / "bundle", shard_bytes=3000)
    shards = open_bundle(tmp_path / "bundle").checkpoint.shards
    count = len(shards)
    assert count > 3
    assert [
        f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)
    ] == [shard.name for shard in shards]
    for shard in shards:
        sizes = [array.nbytes for array in _tensors_of(shard).values()]
        assert sum(sizes) <= 3000 or len(sizes) == 1


def _tensors_of(shard: Path) -> dict[str, np.ndarray]:
    tensors = open_checkpoint(shard.parent).tensors
    return {n: tensors[n] for n, info in tensors.infos.items() if info.file == shard}


def test_the_config_is_the_sources_and_one_block_more(tmp_path: Path) -> None:
    written = write_tiny_bundle(tmp_path)
    config = read_json(tmp_path / "bundle" / "config.json")
    assert written.info.to_json() == config.pop("attnquant")
    assert config == read_json(tmp_path / "model" / "config.json")


def test_the_block_names_the_source_and_its_shards(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model", shards=2)
    source = write_tiny_bundle(tmp_path).info.source
    expected = {
        file.name: "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()
        for file in (tmp_path / "model").glob("*.safetensors")
    }
    assert ("model", expected) == (source.name, source.shards)


def test_the_block_records_the_error_of_what_is_stored(tmp_path: Path) -> None:
    info = write_tiny_bundle(tmp_path).info
    weff = reconstruct(read_weights(tmp_path / "bundle"))
    for family, error in info.error.items():
        found = {name: w for name, w in weff.items() if family in name}
        exact = relative_frobenius_error(tiny_weights(4), found)
        assert error == pytest.approx(exact, rel=1e-6), family


@pytest.mark.parametrize(
    ("dtypes", "asked", "expected"),
    [
        ((BFLOAT16, BFLOAT16), None, "bfloat16"),
        ((np.float16, np.float16), None, "float32"),
        ((BFLOAT16, np.float32), None, "float32"),
        ((np.float32, np.float32), "bfloat16", "bfloat16"),
    ],
)
def test_theta_has_one_storage_dtype(
    tmp_path: Path, dtypes: tuple, asked: str | None, expected: str
) -> None:
    weights = tiny_weights(1, dtype=dtypes[0]) | {
        weight_name(1, family): array
        for family, array in _projections(dtypes[1]).items()
    }
    write_checkpoint(tmp_path / "model", weights, tiny_config(2))
    info = write_tiny_bundle(tmp_path, blocks=1, dtype=asked).info
    assert expected == info.dtype
    assert open_bundle(tmp_path / "bundle").info == info


def _projections(dtype: np.dtype) -> dict[str, np.ndarray]:
    weights = tiny_weights(1, seed=1, dtype=dtype)
    return {n.split(".")[3]: w for n, w in weights.items() if "_proj" in n}


SIDE_FILES = ["tokenizer.json", "chat_template.jinja", "generation_config.json", "NOTE"]
LEFT_OUT = ["pytorch_model.bin", "model.gguf", ".hidden", "flax.index.json"]


def test_all_files_but_weights_are_copied(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model", shards=2)
    for name in SIDE_FILES + LEFT_OUT:
        (path / name).write_text(name)
    write_tiny_bundle(tmp_path)
    bundle = tmp_path / "bundle"
    assert {name: (bundle / name).read_text() for name in SIDE_FILES} == {
        name: name for name in SIDE_FILES
    }
    assert sorted(file.name for file in bundle.iterdir()) == sorted(
        [
            *SIDE_FILES,
            "config.json",
            "model-00001-of-00001.safetensors",
            "model.safetensors.index.json",
        ]
    )


def test_a_bundle_is_readable_by_all(tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path)
    bundle = tmp_path / "bundle"
    assert bundle.stat().st_mode & 0o777 == 0o755
    assert {0o644} == {
        file.stat().st_mode & 0o777 for file in bundle.glob("*.safetensors")
    }


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_the_embedding_is_left_out(tmp_path: Path, tied: bool) -> None:
    weights = tiny_weights(4)
    named = {"model." + name: array for name, array in weights.items()}
    named["lm_head.weight"] = weights["embed_tokens.weight"]
    config = tiny_config(4, tie_word_embeddings=tied)
    write_checkpoint(tmp_path / "model", named, config, prefix="")
    write_tiny_bundle(tmp_path)
    assert ("lm_head.weight" in read_weights(tmp_path / "bundle")) is not tied


def test_ignored_tensors_are_left_out(tmp_path: Path) -> None:
    weights = tiny_weights(4) | {"rotary.inv_freq": np.ones(3, np.float32)}
    write_checkpoint(tmp_path / "model", weights, tiny_config(4))
    prefix_map = PrefixMap({"model.": ""}, ignored=("*.inv_freq",))
    write_tiny_bundle(tmp_path, prefix_map=prefix_map)
    assert "rotary.inv_freq" not in read_weights(tmp_path / "bundle")


def test_progress_runs_from_the_first_step_to_the_last(tmp_path: Path) -> None:
    steps: list[tuple[Any, ...]] = []
    path = write_tiny_checkpoint(tmp_path / "model")
    write_bundle(
        plan(path), tmp_path / "out", progress=lambda *step: steps.append(step)
    )
    done = [step[1] for step in steps]
    # One step per tensor of the checkpoint: 4 layers of 7 and a norm, and 2 more.
    assert {len(tiny_weights(4))} == {step[2] for step in steps}
    assert done == sorted(done)
    assert done[-1] == len(tiny_weights(4))
    assert steps[0][0] == "W0.0.q_proj"


def test_what_was_written_is_told(tmp_path: Path) -> None:
    written = write_tiny_bundle(tmp_path)
    assert written.path == tmp_path / "bundle"
    assert written.source_bytes == sum(a.nbytes for a in tiny_weights(4).values())


def test_missing_parents_of_the_target_are_made(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model")
    write_bundle(plan(path), tmp_path / "a" / "b" / "bundle")
    open_bundle(tmp_path / "a" / "b" / "bundle")


def test_overwriting_replaces_the_old_bundle(tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path)
    out = tmp_path / "bundle"
    (out / "stale").write_text("of the old one")
    write_bundle(plan(tmp_path / "model", blocks=1), out, overwrite=True)
    assert open_bundle(out).info.layout.shared_blocks == 1
    assert not (out / "stale").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "model"]


def test_overwriting_a_link_replaces_what_it_leads_to(tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "bundle")
    write_bundle(plan(tmp_path / "model", blocks=1), link, overwrite=True)
    assert link.is_symlink()
    assert open_bundle(tmp_path / "bundle").info.layout.shared_blocks == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "link", "model"]


def test_a_bundle_is_the_same_wherever_it_is_made(tmp_path: Path) -> None:
    write_tiny_bundle(tmp_path)
    again = write_bundle(plan(tmp_path / "model"), tmp_path / "again").path
    for file in (tmp_path / "bundle").iterdir():
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name


def test_a_field_of_the_config_survives_as_it_is(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "model")
    edit_json(path / "config.json", ["note"], "Größe 1e400 \N{SNOWMAN}")
    write_tiny_bundle(tmp_path)
    config = read_json(tmp_path / "bundle" / "config.json")
    assert config["note"] == "Größe 1e400 \N{SNOWMAN}"
