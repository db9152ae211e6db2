"""What cannot be served is refused by name, before anything is compiled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from attnquant.errors import (
    AttnQuantError,
    CheckpointError,
    ServingError,
    SettingError,
)
from attnquant.testing.in_process import InProcessModel
from attnquant.testing.parity import make_bundle
from gemma4_support.golden import Setting
from gemma4_support.tiny import write_tiny_checkpoint

LAYER: Final = "layers.5.self_attn"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "tiny")


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
    """Change fields of the decoder's config."""
    file = path / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["text_config"] |= changes
    file.write_text(json.dumps(config), encoding="utf-8")


def edit_weights(path: Path, **changes: np.ndarray | None) -> None:
    """Set or drop tensors of the decoder."""
    (file,) = path.glob("*.safetensors")
    named = {f"model.language_model.{name}": w for name, w in changes.items()}
    weights = load_file(file) | named
    save_file({name: w for name, w in weights.items() if w is not None}, file)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_kv_shared_layers", 2),
        ("hidden_size_per_layer_input", 32),
        ("use_bidirectional_attention", "all"),
    ],
)
def test_what_max_does_not_serve_is_refused_before_weights_are_read(
    checkpoint: Path, field: str, value: object
) -> None:
    edit_config(checkpoint, **{field: value})
    # Refused as well, as soon as it is read.
    nan = np.full((128, 96), np.nan, np.float32)
    edit_weights(checkpoint, **{"layers.0.self_attn.q_proj.weight": nan})
    error = refusal(checkpoint, CheckpointError)
    assert error.subject == f"config.json: {field}"
    assert error.found == repr(value)


def test_a_window_too_narrow_for_a_cpu_is_refused(checkpoint: Path) -> None:
    edit_config(checkpoint, sliding_window=64)
    error = refusal(checkpoint, ServingError)
    assert error.subject == "config.json: sliding_window"
    assert (error.expected, error.found) == ("at least 128 on a CPU", "64")


def test_a_width_that_crashes_on_a_cpu_is_refused(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "narrow", hidden_size=80)
    error = refusal(checkpoint, ServingError)
    assert error.subject == "config.json: hidden_size"
    assert (error.expected, error.found) == ("a multiple of 32 on a CPU", "80")


EXPERTS: Final = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}


def test_experts_with_another_activation_are_refused(checkpoint: Path) -> None:
    edit_config(checkpoint, **EXPERTS, hidden_activation="silu")
    error = refusal(checkpoint, ServingError)
    assert error.subject == "config.json: hidden_activation"


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_experts", None), ("moe_intermediate_size", 0), ("top_k_experts", 5)],
)
def test_experts_without_their_numbers_are_refused(
    checkpoint: Path, field: str, value: object
) -> None:
    edit_config(checkpoint, **EXPERTS | {field: value})
    error = refusal(checkpoint, CheckpointError)
    assert error.subject == f"config.json: {field}"
    assert error.found == repr(value)


def test_a_kind_of_layer_that_gemma_4_does_not_have_is_refused(
    checkpoint: Path,
) -> None:
    kinds = ["sliding_attention", "chunked_attention", *["full_attention"] * 4]
    edit_config(checkpoint, layer_types=kinds)
    error = refusal(checkpoint, CheckpointError)
    assert error.subject == "config.json: layer_types[1]"
    assert error.found == "'chunked_attention'"


def test_fewer_kinds_than_layers_are_refused(checkpoint: Path) -> None:
    edit_config(checkpoint, layer_types=["full_attention"] * 5)
    # By transformers, which MAX reads the config with before it asks any plugin.
    with pytest.raises(Exception, match=r"\(6\) must be equal .* `layer_types` \(5\)"):
        InProcessModel(checkpoint)


@pytest.mark.parametrize(
    ("field", "value", "subject"),
    [
        ("head_dim", 16, "layers.0.self_attn.q_proj.weight"),
        ("global_head_dim", 32, f"{LAYER}.q_proj.weight"),
        ("num_global_key_value_heads", 2, f"{LAYER}.k_proj.weight"),
    ],
)
def test_head_dims_that_contradict_the_tensors_are_refused(
    checkpoint: Path, field: str, value: int, subject: str
) -> None:
    edit_config(checkpoint, **{field: value})
    error = refusal(checkpoint, CheckpointError)
    assert error.subject == subject
    assert "from config.json" in error.expected


def test_values_where_keys_are_values_are_refused(checkpoint: Path) -> None:
    edit_weights(checkpoint, **{f"{LAYER}.v_proj.weight": np.ones((64, 96), "f4")})
    error = refusal(checkpoint, CheckpointError)
    assert error.subject == f"{LAYER}.v_proj.weight"


def test_missing_values_are_named(checkpoint: Path) -> None:
    edit_weights(checkpoint, **{"layers.1.self_attn.v_proj.weight": None})
    error = refusal(checkpoint, CheckpointError)
    assert error.subject == "layers.1.self_attn.v_proj.weight"


def test_a_missing_scalar_is_named(checkpoint: Path) -> None:
    edit_weights(checkpoint, **{"layers.3.layer_scalar": None})
    error = refusal(checkpoint, CheckpointError)
    assert error.subject == "language_model.layers.3.layer_scalar"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ATTNQUANT_BLOCKS", "3"),
        ("ATTNQUANT_RANK", "8"),
        ("ATTNQUANT_TIE", "attn"),
    ],
)
def test_a_variable_that_contradicts_the_bundle_is_refused(
    checkpoint: Path, tmp_path: Path, variable: str, value: str
) -> None:
    bundle = make_bundle(checkpoint, Setting("g4-r4", 4, 4), tmp_path / "bundle")
    error = refusal(bundle, SettingError, {variable: value})
    assert error.subject == variable
    assert error.found == value
