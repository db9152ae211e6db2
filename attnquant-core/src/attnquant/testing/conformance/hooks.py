"""The hooks part: what needs MAX and compiles nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from attnquant.errors import AttnQuantError, CheckpointError, ServingError
from attnquant.testing.checkpoints import BFLOAT16
from attnquant.testing.conformance.model import (
    ConformanceModel,
    Setting,
    applies_where,
    part,
)
from attnquant.testing.conformance.structural import copy_checkpoint
from attnquant.testing.in_process import InProcessModel, attnquant_environment
from attnquant.testing.parity import make_bundle
from attnquant.theta.names import ProjectionKey


class Loaded(NamedTuple):
    """What MAX would compile.

    Attributes:
        decoder: The module.
        weights: Numpy arrays by the module's names.
        config: The package's own model config.
    """

    decoder: Any
    weights: dict[str, np.ndarray[Any, Any]]
    config: Any


class _EnoughError(Exception):
    """Raised where everything is loaded and nothing compiled."""


def load_uncompiled(path: Path, formulation: str, **environ: str) -> Loaded:
    """Load a checkpoint or bundle the whole way through MAX, up to the compiler.

    Args:
        path: What is served.
        formulation: One of `attnquant.settings.FORMULATIONS`.
        environ: Further ``ATTNQUANT_`` variables.

    Raises:
        AttnQuantError: If the package refuses it.
    """
    from attnquant.serving import pipeline_model
    from attnquant.serving.arrays import to_array

    seen: list[Loaded] = []
    real = pipeline_model.load_weights
    configs: list[Any] = []
    real_finish = pipeline_model.AttnQuantPipelineModelMixin.finish_config

    def finish(self: Any, config: Any) -> None:
        real_finish(self, config)
        configs.append(config)

    def load(module: Any, state_dict: Any) -> None:
        real(module, state_dict)
        arrays = {name: to_array(weight) for name, weight in state_dict.items()}
        seen.append(Loaded(module, arrays, configs[-1]))
        raise _EnoughError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_model, "load_weights", load)
        patch.setattr(
            pipeline_model.AttnQuantPipelineModelMixin, "finish_config", finish
        )
        variables = {"ATTNQUANT_FORMULATION": formulation, **environ}
        error = refusal(path, variables, Exception)
    if seen:
        return seen[0]
    raise error


def refusal(
    path: Path, environ: dict[str, str], kind: type[Exception] = AttnQuantError
) -> Exception:
    """Return the error of AttnQuant's own with which MAX cannot load a model."""
    try:
        InProcessModel(path, environ=environ).close()
    # MAX wraps what is raised beneath it in errors of its own.
    except Exception as raised:
        error: BaseException | None = raised
        while error is not None:
            if isinstance(error, AttnQuantError | _EnoughError):
                assert isinstance(error, kind), error
                return error
            error = error.__cause__ or error.__context__
        raise
    pytest.fail(f"{path} is served, and should have been refused")


@part("hooks")
class HooksConformance(ConformanceModel):
    """Hooks 4 and 5, and what is loaded and refused before anything is compiled."""

    def test_kv_params_agree_with_the_config(self, checkpoint: Path) -> None:
        """Each layer has a place in a cache that fits its keys."""
        from max.nn.kv_cache import MultiKVCacheParams

        params = self._kv_params(checkpoint)
        kinds = list(self.decoder_config.get("layer_types") or [""] * self.num_layers)
        caches: dict[str, Any] = (
            dict(params.children)
            if isinstance(params, MultiKVCacheParams)
            else dict.fromkeys(kinds, params)
        )
        shapes = self.projection_shapes()
        for layer, kind in enumerate(kinds):
            keys = shapes[ProjectionKey(layer, "k_proj")][0]
            cache = caches[kind]
            assert cache.n_kv_heads * cache.head_dim == keys, f"layer {layer}"
        if isinstance(params, MultiKVCacheParams):
            expected = {kind: kinds.count(kind) for kind in kinds}
            assert {k: c.num_layers for k, c in caches.items()} == expected
        else:
            assert params.num_layers == self.num_layers

    def _kv_params(self, checkpoint: Path) -> Any:
        from max.dtype import DType
        from max.graph import DeviceRef
        from max.pipelines.lib import PipelineConfig
        from max.pipelines.lib.config import PipelineArgs

        with attnquant_environment({}):
            pipeline_config = PipelineConfig.from_args(
                PipelineArgs.from_flat_kwargs(
                    model_path=str(checkpoint),
                    device_specs="cpu",
                    quantization_encoding="float32",
                    custom_architectures=["attnquant"],
                )
            )
        model = pipeline_config.model
        return self.supplied().kv_params(
            huggingface_config=model.huggingface_config,
            pipeline_config=pipeline_config,
            devices=[DeviceRef.CPU()],
            kv_cache_config=model.kv_cache,
            cache_dtype=DType.float32,
        )

    def test_bundle_and_loading_give_the_same_bits(
        self, checkpoint: Path, bundle: Path
    ) -> None:
        """A bundle, and decomposing while loading, give the graph the same weights."""
        stored = load_uncompiled(bundle, "gemm").weights
        loaded = load_uncompiled(
            checkpoint,
            "gemm",
            ATTNQUANT_BLOCKS=str(self.setting.shared_blocks),
            ATTNQUANT_RANK=str(self.setting.rank),
            ATTNQUANT_TIE=self.setting.families,
        ).weights
        assert stored.keys() == loaded.keys()
        assert any(name.endswith(".U") for name in stored)
        for name, weight in stored.items():
            assert weight.dtype == loaded[name].dtype
            assert weight.tobytes() == loaded[name].tobytes(), name

    def test_config_carries_the_settings(self, bundle: Path) -> None:
        """The model's config has the four fields and the layout of what it serves."""
        config = load_uncompiled(bundle, "dense").config
        assert config.shared_blocks == self.setting.shared_blocks
        assert config.lora_rank == self.setting.rank
        assert config.tie_families == self.setting.families
        assert config.formulation == "dense"
        assert config.theta_layout.num_layers == self.num_layers

    def test_attention_is_built_around_the_projections(self, bundle: Path) -> None:
        """Each layer's attention holds the projections it was given, and no others."""
        loaded = load_uncompiled(bundle, "gemm")
        layout = loaded.config.theta_layout
        names = loaded.decoder.raw_state_dict()
        for base, layers in layout.bases.items():
            for layer in layers:
                factors = [
                    name
                    for name in names
                    if f".layers.{layer}." in name and f".{base.family}." in name
                ]
                expected = ["U", "V", "s"] if layout.rank_of(base) else []
                found = sorted(name.rpartition(".")[2] for name in factors)
                assert found == expected, (layer, base.family)

    def test_a_missing_tensor_is_refused_by_name(
        self, checkpoint: Path, tmp_path: Path
    ) -> None:
        """A tensor that is no projection is missed before anything is compiled."""
        sources = self.supplied().prefix_map(self.config).rename(self.weights())
        name = next(n for n in sources if n.startswith("layers.0.") and "norm" in n)
        changes = {sources[name]: lambda _: None}
        broken = copy_checkpoint(checkpoint, tmp_path / "broken", changes)
        error = refusal(broken, {}, CheckpointError)
        assert name.split(".")[2] in str(error)

    def test_a_setting_that_contradicts_the_bundle_is_refused(
        self, bundle: Path
    ) -> None:
        """A variable may repeat what the bundle says, and not say something else."""
        error = refusal(bundle, {"ATTNQUANT_BLOCKS": str(self.num_layers)})
        assert isinstance(error, AttnQuantError)
        assert error.subject == "ATTNQUANT_BLOCKS"

    def test_bfloat16_on_a_cpu_is_refused_with_the_flag(
        self, checkpoint: Path, tmp_path: Path
    ) -> None:
        """MAX cannot serve bfloat16 on a CPU; the message names what to add."""
        from max.pipelines.lib import PipelineConfig
        from max.pipelines.lib.config import PipelineArgs

        halve = dict.fromkeys(self.weights(), _to_bfloat16)
        config: dict[str, Any] = {"dtype": "bfloat16"}
        if "text_config" in self.config:
            config["text_config"] = dict(self.decoder_config) | config
        path = copy_checkpoint(checkpoint, tmp_path / "bfloat16", halve, **config)
        with (
            attnquant_environment({}),
            pytest.raises(Exception, match="--quantization-encoding float32"),
        ):
            PipelineConfig.from_args(
                PipelineArgs.from_flat_kwargs(
                    model_path=str(path),
                    device_specs="cpu",
                    custom_architectures=["attnquant"],
                )
            )

    @applies_where(lambda model: bool(model.decoder_config.get("sliding_window")))
    def test_a_narrow_window_is_refused(self, checkpoint: Path, tmp_path: Path) -> None:
        """A sliding window that MAX cannot compile for CPUs is refused by its name."""
        config: dict[str, Any] = {"sliding_window": 64}
        if "text_config" in self.config:
            config = {"text_config": dict(self.decoder_config) | config}
        narrow = copy_checkpoint(checkpoint, tmp_path / "narrow", {}, **config)
        error = refusal(narrow, {}, ServingError)
        assert "sliding_window" in str(error)

    def test_passthrough_bundles_load_at_every_formulation(
        self, checkpoint: Path, tmp_path: Path
    ) -> None:
        """A passthrough bundle gives a dense graph the checkpoint's own weights."""
        path = make_bundle(checkpoint, Setting(), tmp_path / "bundle")
        stored = load_uncompiled(path, "dense").weights
        raw = load_uncompiled(checkpoint, "dense").weights
        assert stored.keys() == raw.keys()
        for name, weight in stored.items():
            np.testing.assert_array_equal(weight, raw[name], err_msg=name)


def _to_bfloat16(tensor: Any) -> Any:
    return tensor.astype(BFLOAT16)
