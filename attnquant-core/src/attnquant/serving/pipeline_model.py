"""What every AttnQuant pipeline model does, whatever its architecture."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from max.driver import Buffer
from max.engine import InferenceSession, Model
from max.graph.weights import WeightData
from max.nn.layer import Module
from max.pipelines.lib.graph_specs import GraphRole, GraphSpec

from attnquant.errors import CheckpointError, ServingError
from attnquant.hookspecs import AttentionFactory
from attnquant.orphans import end_with_server
from attnquant.plugins import installed_plugins
from attnquant.registry import check_worker
from attnquant.serving.arrays import to_array
from attnquant.serving.compile_cache import CheckedCache
from attnquant.serving.decoder import AttnQuantDecoder
from attnquant.serving.formulations import (
    use_fused_formulation,
    use_precomputed_weff_outside,
)
from attnquant.serving.fused import kernel_extensions
from attnquant.serving.model_config import AttnQuantConfigMixin
from attnquant.serving.start_log import TimedGraphSpec
from attnquant.serving.watch import end_with_files
from attnquant.serving.weight_adapter import Adapted, WeightAdapter
from attnquant.theta.bundle import open_bundle
from attnquant.theta.checkpoint import open_checkpoint
from attnquant.theta.layout import ThetaLayout


class AttnQuantPipelineModelMixin:
    """Mixed in before one of MAX's single-decoder pipeline models.

    A model package says which module is the decoder (`build_decoder`) and whatever is
    particular to it; loading, checking, naming and the single device are done here.
    """

    weight_adapter: ClassVar[WeightAdapter]
    """The architecture's."""

    _adapted: Adapted
    _graph_name: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Load as MAX does; arguments are MAX's and handed through.

        The first of ours that runs in a server's worker: it must have the plugins that
        the server chose this class from, and end when the server does.

        Raises:
            PluginError: If the worker sees other plugins than its server.
        """
        end_with_server()
        check_worker(installed_plugins(), os.environ)
        host: Any = super()
        host.__init__(*args, **kwargs)

    def build_decoder(
        self, model_config: Any, build_attention: AttentionFactory
    ) -> AttnQuantDecoder:
        """Return the module whose graph is served; the model package implements it.

        Args:
            model_config: The package's own config, with a layout.
            build_attention: What the plugin's attention hook gave for it.
        """
        raise NotImplementedError

    @property
    def signal_buffers(self) -> list[Buffer]:
        """One device needs no signalling; MAX's Gemma models would allocate some."""
        return []

    def _load_state_dict(self) -> dict[str, WeightData]:
        # The MAX model this is mixed into supplies the attributes used here.
        host: Any = self
        check_files(Path(host.pipeline_config.model.model_path))
        weights = {name: weight.data() for name, weight in host.weights.items()}
        self._adapted = self.weight_adapter.adapt(
            weights,
            host._hf_config_for_weights(),  # noqa: SLF001 (so MAX names its hooks)
            host.dtype,
        )
        return self._adapted.state_dict

    def load_graphs(self, session: InferenceSession) -> dict[str, Model]:
        """Load as MAX does, out of a compile cache that was checked before."""
        cache = CheckedCache()
        host: Any = super()
        models: dict[str, Model] = host.load_graphs(session)
        cache.loaded(self._graph_name)
        return models

    def finish_config(self, config: AttnQuantConfigMixin) -> None:
        """Tell a new model config what the weight adapter found."""
        config.apply_settings(self._adapted.settings)
        config.layout = self._adapted.layout
        config.storage = self._adapted.storage

    def graph_specs(self, model_config: Any) -> dict[str, GraphSpec]:
        """Return the decoder's graph, weights bound and checked."""
        host: Any = self
        supplied = installed_plugins().find(self.weight_adapter.architecture)
        decoder = self.build_decoder(
            model_config, supplied.attention_factory(model_config)
        )
        load_weights(decoder, self._adapted.state_dict)
        if model_config.devices[0].is_cpu():
            # A GPU has them in memory of its own.
            end_with_files(map(to_array, self._adapted.state_dict.values()))
        # The graph's registry holds what it binds; let go of the rest.
        self._adapted = dataclasses.replace(self._adapted, state_dict={})
        fused = use_fused_formulation(model_config.formulation)
        self._graph_name = graph_name(decoder, *_traits(model_config))
        return {
            GraphRole.DECODER: TimedGraphSpec(
                decoder,
                self._graph_name,
                host._bind_graph_inputs(decoder.input_tree()),  # noqa: SLF001
                weights=decoder.state_dict(auto_initialize=False),
                custom_extensions=kernel_extensions() if fused else [],
            )
        }


def _traits(config: Any) -> Iterator[str]:
    """Yield what of the graph's body its weights do not tell."""
    if use_fused_formulation(config.formulation):
        yield "fused"
    # Without W0 in the graph, bands make no difference to it.
    if use_precomputed_weff_outside(config.formulation):
        return
    layout: ThetaLayout = config.theta_layout
    if not layout.has_equal_bands:
        yield f"bands {dict(layout.bands)}"


def graph_name(decoder: Module, *traits: str) -> str:
    """Return a graph's name: the decoder's class, and a digest of its weights.

    MAX's compile cache knows graphs by their bodies and gives one back under the name
    it was first compiled with; its exported artifacts are matched by name. So equal
    bodies must have equal names and different ones different names: what tells
    layouts and formulations apart in the body is which weights there are. For the
    same reason names must stay the same from version to version, or a graph cached
    by an older one is given back under a name that nobody asks for.

    Args:
        decoder: The graph's module.
        traits: What else tells its body from others with the same weights.
    """
    weights = sorted(
        f"{name} {weight.dtype} {weight.shape}"
        for name, weight in decoder.raw_state_dict().items()
    )
    digest = hashlib.sha256("\n".join([*weights, *traits]).encode()).hexdigest()
    return f"{type(decoder).__name__}_{digest[:16]}"


def check_files(path: Path) -> None:
    """Check a local checkpoint or bundle before MAX's loader reads it.

    MAX picks one of two tensors of a name and does not look at a bundle's block.

    Raises:
        CheckpointError: If a file is missing or damaged, or a bundle is not whole.
    """
    if not path.is_dir():
        # A name on the Hugging Face Hub; MAX has put its files into a cache.
        return
    if open_checkpoint(path).is_bundle:
        open_bundle(path)


def load_weights(module: Module, state_dict: Mapping[str, WeightData]) -> None:
    """Load weights after comparing the two sets of names.

    Args:
        module: The decoder.
        state_dict: Weights by full name.

    Raises:
        CheckpointError: If the checkpoint lacks a weight or has one too many, naming
            it.
        ServingError: If MAX refuses a weight's shape or dtype.
    """
    expected = module.raw_state_dict().keys()
    if missing := sorted(expected - state_dict.keys()):
        raise CheckpointError(
            missing[0],
            expected=f"{len(expected)} weights, this one among them",
            found=f"{len(missing)} missing: {_some(missing)}",
        )
    if surplus := sorted(state_dict.keys() - expected):
        raise CheckpointError(
            surplus[0],
            expected=f"{len(expected)} weights, this one not among them",
            found=f"{len(surplus)} too many: {_some(surplus)}",
        )
    try:
        # Safetensors files give no alignment beyond a byte. The names were compared
        # above, so there is nothing left that strict=False could drop silently.
        module.load_state_dict(state_dict, weight_alignment=1, strict=False)
    except ValueError as error:
        raise ServingError("weights", found=str(error)) from error


def _some(names: list[str], shown: int = 5) -> str:
    return ", ".join(names[:shown]) + (", ..." if len(names) > shown else "")
