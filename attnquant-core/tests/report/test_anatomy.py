"""What a report says of each projection equals its definition in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from attnquant.errors import CheckpointError
from attnquant.report.anatomy import Anatomy, examine, singular_values
from attnquant.theta.bundle import Bundle, open_bundle
from attnquant.theta.names import ProjectionKey
from attnquant.theta.statistics import (
    Accumulator,
    InputKey,
    SourceModel,
    Statistics,
    open_statistics,
)
from core_support.bundles import write_tiny_bundle
from core_support.tiny import (
    SHAPES,
    Array,
    read_weights,
    tiny_config,
    tiny_weights,
    weight_name,
    write_checkpoint,
)

LAYERS, BANDS, RANK = 5, 3, 4
INPUTS = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "o_proj": "o"} | {
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "down_proj": "down",
}
WEIGHTS = tiny_weights(LAYERS)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    write_checkpoint(tmp_path / "model", WEIGHTS, tiny_config(LAYERS))
    return open_bundle(write_tiny_bundle(tmp_path, blocks=BANDS, rank=RANK).path)


@pytest.fixture
def statistics(tmp_path: Path) -> Statistics:
    rng = np.random.default_rng(3)
    accumulator = Accumulator()
    for layer in range(LAYERS):
        for family, name in INPUTS.items():
            if (layer, family) != (0, "q_proj") and family in {"k_proj", "v_proj"}:
                continue
            if family != "up_proj":
                block = rng.standard_normal((9, SHAPES[family][1]))
                accumulator.add(InputKey(layer, name), block)
    accumulator.write(tmp_path / "statistics", SourceModel("m", "", {"a": "b"}), [])
    return open_statistics(tmp_path / "statistics")


def parts(bundle: Bundle, key: ProjectionKey) -> tuple[Array, Array, Array]:
    """Return W, W0 and W_eff in float64."""
    theta = read_weights(bundle.checkpoint.path)
    base = theta[f"W0.{key.layer * BANDS // LAYERS}.{key.family}"].astype(np.float64)
    effective = base
    name = f"layers.{key.layer}.{key.family}"
    if f"{name}.U" in theta:
        u, s, v = (theta[f"{name}.{part}"].astype(np.float64) for part in "UsV")
        effective = base + (u * s) @ v
    return WEIGHTS[weight_name(*key)].astype(np.float64), base, effective


def norm(matrix: Array) -> float:
    return float(np.linalg.norm(matrix))


def test_errors_equal_their_definitions(bundle: Bundle, statistics: Statistics) -> None:
    anatomy = examine(bundle, WEIGHTS, statistics)
    assert anatomy.has_output_errors
    assert len(anatomy.projections) == LAYERS * len(SHAPES)
    for key, found in anatomy.projections.items():
        exact, base, effective = parts(bundle, key)
        moment = statistics.moment(InputKey(key.layer, INPUTS[key.family]))
        close = {"rel": 1e-4, "abs": 1e-6}
        error = norm(exact - effective) / norm(exact)
        assert found.error == pytest.approx(error, **close), key
        base_error = norm(exact - base) / norm(exact)
        assert found.base_error == pytest.approx(base_error, **close), key
        lost = np.trace((exact - effective) @ moment @ (exact - effective).T)
        output = np.sqrt(lost / np.trace(exact @ moment @ exact.T))
        assert found.output_error == pytest.approx(output, rel=1e-3, abs=1e-6), key
        assert found.rank == (0 if key.layer == 4 else RANK)


def test_without_statistics_no_error_of_outputs_is_made_up(bundle: Bundle) -> None:
    anatomy = examine(bundle, WEIGHTS)
    assert not anatomy.has_output_errors
    assert {p.output_error for p in anatomy.projections.values()} == {None}


def test_spectra_are_of_layers_with_a_low_rank_term(bundle: Bundle) -> None:
    anatomy: Anatomy = examine(bundle, WEIGHTS)
    assert list(anatomy.spectra) == list(SHAPES)
    for family, chosen in anatomy.spectra.items():
        # Layer 4 is alone in its band; of the other four, three evenly spread.
        assert len(chosen) == 3
        assert {0, 3} < set(chosen) < {0, 1, 2, 3}
        for layer, spectrum in chosen.items():
            exact, base, _ = parts(bundle, ProjectionKey(layer, family))
            for matrix, values in (
                (exact, spectrum.weight),
                (exact - base, spectrum.residual),
            ):
                expected = np.linalg.svd(matrix, compute_uv=False)
                np.testing.assert_allclose(values, expected, atol=1e-6 * expected[0])


@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (5, 5)])
def test_singular_values_fall_and_are_those_of_lapack(shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(0).standard_normal(shape)
    expected = np.linalg.svd(matrix, compute_uv=False)
    np.testing.assert_allclose(singular_values(matrix), expected, rtol=1e-6)


def test_another_model_is_refused(bundle: Bundle) -> None:
    name = weight_name(1, "o_proj")
    lacking = {key: array for key, array in WEIGHTS.items() if key != name}
    with pytest.raises(CheckpointError, match=rf"{name}: expected .* found none"):
        examine(bundle, lacking)
    other = {**WEIGHTS, name: np.zeros((3, 3), dtype=np.float32)}
    with pytest.raises(CheckpointError, match=r"found \[3, 3\]. Is this what"):
        examine(bundle, other)
