"""A model on MAX that is looked into instead of sampled from: logits, and inputs.

One graph is compiled for it, that of `attnquant.serving.taps`, and no sampler. It is
built with the `dense` formulation, in which a bundle's graph is that of the original:
both, and every other bundle of the same checkpoint, share one compilation.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import CPU, Buffer, load_devices
from max.engine import InferenceSession
from max.graph.weights import load_weights, weights_format
from max.nn.transformer import ReturnLogits
from max.pipelines.context import TextContext, TokenBuffer
from max.pipelines.kv_cache import load_kv_manager
from max.pipelines.lib import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.lib.config import PipelineArgs
from max.pipelines.lib.graph_specs import GraphRole, GraphSpec

from attnquant.errors import ServingError
from attnquant.plugins import installed_plugins
from attnquant.serving.taps import TAPPED_ROWS, TappedDecoder
from attnquant.settings import BLOCKS, FORMULATION, RANK, TIE
from attnquant.theta.checkpoint import open_checkpoint
from attnquant.theta.statistics import InputKey

Float32 = npt.NDArray[np.float32]


class Probe:
    """A checkpoint or bundle, loaded: token ids in, logits or projection inputs out."""

    def __init__(
        self,
        path: Path,
        *,
        window: int,
        devices: str = "cpu",
        encoding: str = "float32",
    ) -> None:
        """Compile (or find in MAX's cache) and load.

        A raw checkpoint runs as it is, whatever `ATTNQUANT_BLOCKS` and its kin say.

        Args:
            path: The directory.
            window: The most tokens in one run.
            devices: Where to run, as MAX's ``--devices`` has it.
            encoding: MAX's name of the dtype to compute in.

        Raises:
            AttnQuantError: If the files, the architecture or the device will not do.
        """
        installed_plugins().find(open_checkpoint(path).architecture)
        self.window = window
        try:
            with _settings({FORMULATION.name: "dense"}):
                self._load(path, devices, encoding)
        except ValueError as error:
            # MAX's way to say that device, encoding and files do not go together.
            raise ServingError(
                f"{path} on {devices} in {encoding}",
                expected="what MAX can run",
                found=" ".join(str(error).split()),
            ) from error

    def _load(self, path: Path, devices: str, encoding: str) -> None:
        arguments: dict[str, Any] = {
            "device_specs": devices,
            "quantization_encoding": encoding,
            "custom_architectures": ["attnquant"],
            "max_batch_size": 1,
            "max_length": self.window + 1,
            # A window is one request, run once and whole.
            "enable_overlap_scheduler": False,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
        }
        config = PipelineConfig.from_args(
            PipelineArgs.from_flat_kwargs(model_path=str(path), **arguments)
        )
        plan = PIPELINE_REGISTRY.retrieve_factory(config).memory_plan
        architecture: Any = PIPELINE_REGISTRY.architecture_for_config(config)
        self._session = InferenceSession(
            devices=load_devices(list(plan.require_device_specs()))
        )
        config.configure_session(self._session)
        files = config.model.resolved_weight_paths()
        self._model: Any = _probing(architecture.pipeline_model)(
            pipeline_config=config,
            session=self._session,
            devices=list(self._session.devices),
            kv_cache_config=config.model.kv_cache,
            weights=load_weights(files),
            adapter=architecture.weight_adapters.get(weights_format(files)),
            return_logits=ReturnLogits.VARIABLE,
            max_batch_size=1,
            memory_plan=plan,
        )
        self._cache = load_kv_manager(
            params=self._model.kv_params,
            max_batch_size=1,
            max_seq_len=self._model.max_seq_len,
            session=self._session,
            available_cache_memory=plan.available_cache_memory,
            is_di_enabled=False,
            model_name=config.model.model_name,
            max_num_input_tokens=config.runtime.max_num_input_tokens,
        )

    def logits(self, tokens: Sequence[int]) -> Float32:
        """Return the logits after each token, ``[tokens, vocabulary]``.

        The array is the graph's own output: it holds until the next run.

        Args:
            tokens: Token ids, at most `window`; they begin a sequence of their own.
        """
        return _host(self._run(tokens, logits=len(tokens), taps=0).logits)

    def inputs(self, tokens: Sequence[int]) -> dict[InputKey, Float32]:
        """Return what the projections of each layer are applied to, ``[tokens, in]``.

        Args:
            tokens: Token ids, at most `window`; they begin a sequence of their own.
        """
        self._run(tokens, logits=1, taps=len(tokens))
        return {key: _host(tap) for key, tap in self._model.probe.take_taps().items()}

    def _run(self, tokens: Sequence[int], *, logits: int, taps: int) -> Any:
        if not 0 < len(tokens) <= self.window:
            raise ServingError(
                "tokens", expected=f"1 to {self.window}", found=str(len(tokens))
            )
        context = TextContext(
            max_length=self.window + 1,
            tokens=TokenBuffer(np.asarray(tokens, dtype=np.int64)),
        )
        self._model.probe.rows = taps
        self._cache.claim(context)
        try:
            self._cache.alloc(context)
            inputs = self._model.prepare_initial_token_inputs(
                replica_batches=[[context]],
                kv_cache_inputs=self._cache.runtime_inputs([[context]]),
                return_n_logits=logits,
            )
            return self._model.execute(inputs)
        finally:
            self._cache.release(context)


class _ProbedGraph:
    """The compiled graph as the pipeline model sees it; what is tapped stays here."""

    def __init__(self, model: Any, keys: Sequence[InputKey]) -> None:
        self._model = model
        self._keys = keys
        self._taps: Sequence[Buffer] = ()
        self.rows = 0

    def execute(self, *inputs: Any) -> list[Buffer]:
        """Run it, and return the outputs that the decoder itself has."""
        rows = Buffer.from_numpy(np.array([self.rows], dtype=np.int64))
        outputs = self._model.execute(rows, *inputs)
        own = len(outputs) - len(self._keys)
        self._taps = outputs[own:]
        return list(outputs[:own])

    def take_taps(self) -> dict[InputKey, Buffer]:
        """Return what the last run tapped, and let go of it."""
        taps, self._taps = self._taps, ()
        return dict(zip(self._keys, taps, strict=True))


class _ProbeMixin:
    """Mixed in before a pipeline model of this package, whatever its architecture."""

    probe: _ProbedGraph
    _tapped: TappedDecoder

    def graph_specs(self, model_config: Any) -> dict[str, GraphSpec]:
        # The model this is mixed into supplies the decoder.
        specs: Mapping[str, GraphSpec] = super().graph_specs(model_config)  # type: ignore[misc]
        spec = specs[GraphRole.DECODER]
        self._tapped = TappedDecoder(spec.module)
        tapped = dataclasses.replace(
            spec,
            module=self._tapped,
            name=f"Tapped{spec.name}",
            input_types=(TAPPED_ROWS, *spec.input_types),
        )
        return {**specs, GraphRole.DECODER: tapped}

    def load_graphs(self, session: InferenceSession) -> dict[str, Any]:
        models: dict[str, Any] = super().load_graphs(session)  # type: ignore[misc]
        self.probe = _ProbedGraph(models[GraphRole.DECODER], self._tapped.keys)
        return {**models, GraphRole.DECODER: self.probe}


def _probing(pipeline_model: type[Any]) -> type[Any]:
    return type(f"Probing{pipeline_model.__name__}", (_ProbeMixin, pipeline_model), {})


def _host(buffer: Buffer) -> Float32:
    array: Float32 = buffer.to(CPU()).to_numpy()
    return array


@contextmanager
def _settings(variables: Mapping[str, str]) -> Iterator[None]:
    """Set the variables that models are served with to these and no others."""
    names = [variable.name for variable in (RANK, BLOCKS, TIE, FORMULATION)]
    saved = {name: os.environ.pop(name) for name in names if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(saved)
