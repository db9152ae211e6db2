"""Calibration statistics: means of x·xᵀ, whatever blocks and parts they came in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from attnquant.errors import CheckpointError
from attnquant.theta.checkpoint import open_checkpoint
from attnquant.theta.families import FAMILIES
from attnquant.theta.names import ProjectionKey
from attnquant.theta.statistics import (
    INPUTS,
    Accumulator,
    CalibrationText,
    InputKey,
    SourceModel,
    Statistics,
    describe_source,
    input_of,
    merge_statistics,
    moment_name,
    open_statistics,
)
from core_support.tiny import SHAPES, write_tiny_checkpoint

MODEL = SourceModel("tiny", "sha256:c", {"model.safetensors": "sha256:w"})
TEXT = CalibrationText("a text", "ab" * 32, 7)
KEY = InputKey(0, "qkv")
WIDTHS = {input_of(family): shape[1] for family, shape in SHAPES.items()}


def activations(tokens: int, width: int = 5, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(tokens, width)).astype(np.float32)


def collected(
    path: Path,
    blocks: list[np.ndarray],
    key: InputKey = KEY,
    model: SourceModel = MODEL,
) -> Statistics:
    accumulator = Accumulator()
    for block in blocks:
        accumulator.add(key, block)
    accumulator.write(path, model, [TEXT])
    return open_statistics(path)


def test_a_moment_is_the_mean_of_outer_products(tmp_path: Path) -> None:
    x = activations(50)
    expected = np.mean([np.outer(row, row) for row in x.astype(np.float64)], axis=0)
    statistics = collected(tmp_path / "s", [x])
    np.testing.assert_allclose(statistics.moment(KEY), expected, rtol=1e-5, atol=1e-7)
    assert statistics.tokens == {KEY: 50}
    assert (statistics.model, statistics.texts) == (MODEL, (TEXT,))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any))
def test_blocks_of_any_size_give_the_same_moment(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("statistics")
    x = activations(sum(sizes))
    whole = collected(folder / "whole", [x])
    blocks = collected(folder / "blocks", np.split(x, np.cumsum(sizes)[:-1]))
    assert whole.tokens == blocks.tokens
    np.testing.assert_allclose(whole.moment(KEY), blocks.moment(KEY), atol=1e-6)


@given(st.integers(1, 60), st.integers(1, 60))
def test_merging_parts_gives_the_moment_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, first: int, second: int
) -> None:
    folder = tmp_path_factory.mktemp("statistics")
    x = activations(first + second)
    parts = [
        collected(folder / "a", [x[:first]]),
        collected(folder / "b", [x[first:]]),
    ]
    merge_statistics(parts, folder / "merged")
    merged, whole = (
        open_statistics(folder / "merged"),
        collected(folder / "whole", [x]),
    )
    np.testing.assert_allclose(merged.moment(KEY), whole.moment(KEY), atol=1e-6)
    assert merged.tokens == whole.tokens
    assert merged.texts == (TEXT, TEXT)


def test_a_long_sum_keeps_what_float32_would_lose(tmp_path: Path) -> None:
    # 2**12 squared is 2**24: one more is no longer a float32 of its own.
    blocks = [np.full((1, 1), 2.0**12, np.float32)] + [np.ones((1, 1), np.float32)] * 64
    accumulator = Accumulator()
    for block in blocks:
        accumulator.add(KEY, block)
    accumulator.write(tmp_path / "s", MODEL, [TEXT])
    expected = np.float32((2.0**24 + 64) / 65)
    assert open_statistics(tmp_path / "s").moment(KEY).item() == expected


def test_a_moment_is_exactly_symmetric(tmp_path: Path) -> None:
    moment = collected(tmp_path / "s", [activations(300, 67)]).moment(KEY)
    np.testing.assert_array_equal(moment, moment.T)


def test_the_families_of_a_layer_have_four_inputs() -> None:
    inputs = [input_of(family) for family in FAMILIES]
    assert tuple(dict.fromkeys(inputs)) == INPUTS
    assert inputs == ["qkv"] * 3 + ["o"] + ["gate_up"] * 2 + ["down"]


def whole(path: Path, layers: int = 2, tokens: int = 40) -> Statistics:
    accumulator = Accumulator()
    for layer in range(layers):
        for seed, name in enumerate(INPUTS):
            block = activations(tokens, WIDTHS[name], seed)
            accumulator.add(InputKey(layer, name), block)
    accumulator.write(path, MODEL, [TEXT])
    return open_statistics(path)


def shapes(layers: int) -> dict[ProjectionKey, tuple[int, ...]]:
    return {
        ProjectionKey(layer, family): shape
        for layer in range(layers)
        for family, shape in SHAPES.items()
    }


def test_shapes_that_fit_pass(tmp_path: Path) -> None:
    whole(tmp_path / "s").check_shapes(shapes(2))


def test_a_layer_without_a_moment_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        whole(tmp_path / "s").check_shapes(shapes(3))
    assert caught.value.subject == f"{tmp_path / 's'}: layers.2.qkv.moment"
    assert "layers.2.self_attn.q_proj.weight" in caught.value.expected
    assert caught.value.found == "no such tensor"


def test_a_moment_of_another_size_is_named(tmp_path: Path) -> None:
    wider = shapes(2) | {ProjectionKey(1, "o_proj"): (12, 17)}
    with pytest.raises(CheckpointError) as caught:
        whole(tmp_path / "s").check_shapes(wider)
    assert caught.value.expected.startswith("shape [17, 17]")
    assert caught.value.found == "[16, 16]"


def test_statistics_know_the_checkpoint_they_are_of(tmp_path: Path) -> None:
    first = describe_source(open_checkpoint(write_tiny_checkpoint(tmp_path / "first")))
    statistics = collected(tmp_path / "s", [activations(9)], model=first)
    renamed = (tmp_path / "first").rename(tmp_path / "renamed")
    statistics.check_model(describe_source(open_checkpoint(renamed)))
    other = write_tiny_checkpoint(tmp_path / "other", num_layers=3)
    with pytest.raises(CheckpointError) as caught:
        statistics.check_model(describe_source(open_checkpoint(other)))
    assert "other" in caught.value.expected
    assert "attnquant calibrate" in caught.value.hint


def test_statistics_of_different_models_are_not_merged(tmp_path: Path) -> None:
    other = SourceModel("tiny", "sha256:c", {"model.safetensors": "sha256:v"})
    parts = [
        collected(tmp_path / "a", [activations(9)]),
        collected(tmp_path / "b", [activations(9)], model=other),
    ]
    with pytest.raises(CheckpointError):
        merge_statistics(parts, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_statistics_of_different_inputs_are_not_merged(tmp_path: Path) -> None:
    parts = [
        collected(tmp_path / "a", [activations(9)]),
        collected(tmp_path / "b", [activations(9)], InputKey(1, "o")),
    ]
    with pytest.raises(CheckpointError) as caught:
        merge_statistics(parts, tmp_path / "out")
    assert caught.value.subject == str(tmp_path / "b")


@pytest.mark.parametrize(
    "block",
    [activations(3, 4), activations(3, 6), np.zeros(5), np.zeros((2, 3, 5))],
)
def test_a_block_of_another_width_is_refused(block: np.ndarray) -> None:
    accumulator = Accumulator()
    accumulator.add(KEY, activations(3))
    with pytest.raises(CheckpointError) as caught:
        accumulator.add(KEY, block)
    assert caught.value.subject == "layers.0.qkv.moment"
    assert caught.value.found == f"shape {list(block.shape)}"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_activations_that_are_not_finite_are_refused(value: float) -> None:
    block = activations(3)
    block[1, 2] = value
    with pytest.raises(CheckpointError, match="finite activations"):
        Accumulator().add(KEY, block)


def test_statistics_of_nothing_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        Accumulator().write(tmp_path / "s", MODEL, [])
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    before = collected(path, [activations(9)]).moment(KEY)

    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("attnquant.theta.tensor_file.TensorFile.write", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        collected(path, [activations(5)])
    assert [path] == list(tmp_path.iterdir())
    np.testing.assert_array_equal(before, open_statistics(path).moment(KEY))


def rewritten(path: Path, change: Callable[[dict, dict], None]) -> None:
    from safetensors import safe_open

    arrays = load_file(path)
    with safe_open(path, framework="np") as file:
        metadata = dict(file.metadata())
    change(arrays, metadata)
    save_file(arrays, path, metadata=metadata)


def newer(_: dict, metadata: dict) -> None:
    metadata["attnquant_statistics"] = "2"


def foreign(_: dict, metadata: dict) -> None:
    del metadata["attnquant_statistics"]


def without_tokens(_: dict, metadata: dict) -> None:
    metadata["tokens"] = "{}"


def negative_tokens(_: dict, metadata: dict) -> None:
    metadata["tokens"] = json.dumps({moment_name(*KEY): -1})


def without_model(_: dict, metadata: dict) -> None:
    del metadata["model"]


def broken_texts(_: dict, metadata: dict) -> None:
    metadata["texts"] = "[{}]"


def other_name(arrays: dict, metadata: dict) -> None:
    arrays["x"] = arrays.pop(moment_name(*KEY))
    metadata["tokens"] = json.dumps({"x": 3})


def surplus(arrays: dict, _: dict) -> None:
    arrays["layers.1.qkv.moment"] = np.eye(3, dtype=np.float32)


def oblong(arrays: dict, _: dict) -> None:
    arrays[moment_name(*KEY)] = np.ones((2, 3), np.float32)


def of_float64(arrays: dict, _: dict) -> None:
    arrays[moment_name(*KEY)] = np.eye(5)


HEADERS = [newer, foreign, without_tokens, negative_tokens, without_model]
HEADERS += [broken_texts, other_name, surplus, oblong, of_float64]


@pytest.mark.parametrize("change", HEADERS)
def test_a_damaged_header_is_refused_when_opened(
    tmp_path: Path, change: Callable[[dict, dict], None]
) -> None:
    path = collected(tmp_path / "s", [activations(9)]).path
    rewritten(path, change)
    with pytest.raises(CheckpointError) as caught:
        open_statistics(path)
    assert caught.value.subject.startswith(str(path))
    assert caught.value.expected
    assert caught.value.found


def not_finite(arrays: dict, _: dict) -> None:
    arrays[moment_name(*KEY)][1, 1] = np.nan


def asymmetric(arrays: dict, _: dict) -> None:
    arrays[moment_name(*KEY)][0, 1] += 0.1


def negative(arrays: dict, _: dict) -> None:
    arrays[moment_name(*KEY)][2, 2] = -1


def too_large(arrays: dict, _: dict) -> None:
    arrays[moment_name(*KEY)][0, 1] = arrays[moment_name(*KEY)][1, 0] = 100


@pytest.mark.parametrize("change", [not_finite, asymmetric, negative, too_large])
def test_a_matrix_that_is_no_moment_is_refused_when_read(
    tmp_path: Path, change: Callable[[dict, dict], None]
) -> None:
    path = collected(tmp_path / "s", [activations(9)]).path
    rewritten(path, change)
    with pytest.raises(CheckpointError) as caught:
        open_statistics(path).moment(KEY)
    assert caught.value.subject == f"{path}: layers.0.qkv.moment"


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, str])
def test_what_is_no_file_of_statistics_is_refused(
    tmp_path: Path, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "s")
    with pytest.raises(CheckpointError) as caught:
        open_statistics(tmp_path / "s")
    assert caught.value.subject == str(tmp_path / "s")


def test_an_unseen_direction_is_allowed(tmp_path: Path) -> None:
    # Fewer tokens than dimensions: the moment is singular, and that is normal.
    x = np.zeros((2, 5), np.float32)
    x[0, 0] = 3
    assert np.linalg.matrix_rank(collected(tmp_path / "s", [x]).moment(KEY)) == 1
