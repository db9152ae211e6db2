"""What cannot be served is refused by name, before anything is compiled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from attnquant.errors import (
    AttnQuantError,
    BundleError,
    CheckpointError,
    ServingError,
    SettingError,
)
from attnquant.testing.in_process import InProcessModel
from attnquant.testing.parity import make_bundle
from gemma3_support.golden import Setting
from gemma3_support.tiny import write_tiny_checkpoint

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "tiny")


@pytest.fixture
def bundle(checkpoint: Path, tmp_path: Path) -> Path:
    return make_bundle(checkpoint, Setting("g3-r4", 3, 4), tmp_path / "bundle")


def refusal(
    path: Path, kind: type[AttnQuantError], environ: Mapping[str, str] | None = None
) -> AttnQuantError:
    """Return the error of AttnQuant's own with which MAX cannot load a model."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 (MAX may wrap it)
        InProcessModel(path, environ=environ)
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, AttnQuantError):
        error = error.__cause__ or error.__context__
    assert isinstance(error, kind), caught.value
    return error


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps(config), encoding="utf-8")


def edit_weights(path: Path, **changes: np.ndarray | None) -> None:
    (file,) = path.glob("*.safetensors")
    weights = load_file(file) | changes
    save_file({name: w for name, w in weights.items() if w is not None}, file)


@pytest.mark.parametrize(
    ("environ", "subject"),
    [
        ({"ATTNQUANT_BLOCKS": "9"}, "ATTNQUANT_BLOCKS"),
        ({"ATTNQUANT_BLOCKS": "0"}, "ATTNQUANT_BLOCKS"),
        ({"ATTNQUANT_BLOCKS": "-3"}, "ATTNQUANT_BLOCKS"),
        ({"ATTNQUANT_BLOCKS": "three"}, "ATTNQUANT_BLOCKS"),
        ({"ATTNQUANT_BLOCKS": "3"}, "ATTNQUANT_RANK"),
        ({"ATTNQUANT_BLOCKS": "3", "ATTNQUANT_RANK": "0"}, "ATTNQUANT_RANK"),
        ({"ATTNQUANT_BLOCKS": "3", "ATTNQUANT_RANK": "2.5"}, "ATTNQUANT_RANK"),
        ({"ATTNQUANT_BLOCKS": "3", "ATTNQUANT_RANK": "999"}, "ATTNQUANT_RANK"),
        ({"ATTNQUANT_TIE": "mlp"}, "ATTNQUANT_TIE"),
        ({"ATTNQUANT_FORMULATION": "magic"}, "ATTNQUANT_FORMULATION"),
    ],
)
def test_a_variable_out_of_range_is_refused_by_name(
    checkpoint: Path, environ: dict[str, str], subject: str
) -> None:
    error = refusal(checkpoint, SettingError, environ)
    assert error.subject == subject
    assert error.expected
    assert error.found


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ATTNQUANT_BLOCKS", "4"),
        ("ATTNQUANT_RANK", "8"),
        ("ATTNQUANT_TIE", "attn"),
    ],
)
def test_a_variable_that_contradicts_the_bundle_is_refused(
    bundle: Path, variable: str, value: str
) -> None:
    error = refusal(bundle, SettingError, {variable: value})
    assert error.subject == variable
    assert error.found == value


def test_a_missing_projection_is_named(checkpoint: Path) -> None:
    edit_weights(checkpoint, **{Q_PROJ: None})
    error = refusal(checkpoint, CheckpointError)
    assert error.subject == Q_PROJ.removeprefix("model.")


def test_a_missing_norm_is_named(checkpoint: Path) -> None:
    edit_weights(checkpoint, **{"model.norm.weight": None})
    error = refusal(checkpoint, CheckpointError)
    assert error.subject == "language_model.norm.weight"


def test_a_tensor_that_nothing_maps_is_named(checkpoint: Path) -> None:
    edit_weights(checkpoint, surprise=np.zeros(3, np.float32))
    assert refusal(checkpoint, CheckpointError).subject == "surprise"


def test_a_tensor_too_many_is_named(checkpoint: Path) -> None:
    name = "model.layers.0.extra.weight"
    edit_weights(checkpoint, **{name: np.zeros(3, np.float32)})
    error = refusal(checkpoint, CheckpointError)
    assert error.subject == "language_model.layers.0.extra.weight"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(checkpoint: Path, value: float) -> None:
    (file,) = checkpoint.glob("*.safetensors")
    weight = load_file(file)[Q_PROJ].copy()
    weight[2, 3] = value
    edit_weights(checkpoint, **{Q_PROJ: weight})
    error = refusal(checkpoint, CheckpointError)
    assert error.subject == Q_PROJ.removeprefix("model.")
    assert "[2, 3]" in error.found


def test_a_projection_of_another_shape_than_the_config_says_is_refused(
    checkpoint: Path,
) -> None:
    edit_config(checkpoint, intermediate_size=192)
    error = refusal(checkpoint, CheckpointError)
    assert error.subject == "layers.0.mlp.gate_proj.weight"
    assert "192" in error.expected


def test_one_projection_of_another_shape_is_refused(checkpoint: Path) -> None:
    edit_weights(checkpoint, **{Q_PROJ: np.zeros((96, 128), np.float32)})
    environ = {"ATTNQUANT_BLOCKS": "3", "ATTNQUANT_RANK": "4"}
    error = refusal(checkpoint, CheckpointError, environ)
    assert error.subject == Q_PROJ.removeprefix("model.")
    assert "(96, 128)" in error.found


def test_a_truncated_shard_is_named(checkpoint: Path) -> None:
    (file,) = checkpoint.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Exception, match=r"model\.safetensors|truncat"):
        InProcessModel(checkpoint)


def test_a_bundle_with_a_tensor_of_another_dtype_is_refused(bundle: Path) -> None:
    name = "layers.0.q_proj.s"
    edit_weights(bundle, **{name: np.zeros(4, ml_dtypes.bfloat16)})
    error = refusal(bundle, BundleError)
    assert error.subject == name
    assert (error.expected, error.found) == ("float32 [4]", "bfloat16 [4]")


def test_a_bundle_of_a_newer_format_is_refused(bundle: Path) -> None:
    config = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
    edit_config(bundle, attnquant=config["attnquant"] | {"format_version": 99})
    error = refusal(bundle, BundleError)
    assert "format_version" in error.subject
    assert error.found == "99"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sliding_window", 64),
        ("attn_logit_softcapping", 50.0),
        ("use_bidirectional_attention", True),
        ("quantization_config", {"quant_method": "fp8"}),
    ],
)
def test_a_config_that_would_be_computed_wrongly_is_refused(
    checkpoint: Path, field: str, value: object
) -> None:
    edit_config(checkpoint, **{field: value})
    error = refusal(checkpoint, ServingError)
    assert error.subject == f"config.json: {field}"
