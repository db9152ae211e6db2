"""The weight adapter: a checkpoint's or bundle's tensors to those of the graph.

Its seven steps, in order: prefix map; strip ``language_model.``; pass theta tensors
through as they are; decompose what is not decomposed yet; flat keys to nested names;
cast to the model's dtype; put the graph's prefix in front again.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from max.dtype import DType
from max.graph.weights import WeightData

from attnquant.errors import CheckpointError, SettingError
from attnquant.plugins import installed_plugins
from attnquant.quality import doubtful
from attnquant.serving.arrays import WeightArrays, cast, to_weight
from attnquant.serving.formulations import (
    precompute_weff_outside_graph,
    use_fused_formulation,
    use_precomputed_weff_outside,
)
from attnquant.serving.model_config import bundle_of
from attnquant.serving.start_log import Stopwatch, log_weights
from attnquant.settings import BLOCKS, RANK, TIE, Settings, resolve_settings
from attnquant.theta.bundle import BundleInfo, check_tensors
from attnquant.theta.decompose import iter_decomposed, kept_names, projection_shapes
from attnquant.theta.dtypes import BFLOAT16, Array, common_storage_dtype
from attnquant.theta.families import FAMILIES, module_of
from attnquant.theta.grouping import Grouping
from attnquant.theta.layout import ThetaLayout, check_rank_bound, make_layout
from attnquant.theta.names import (
    ProjectionKey,
    base_name,
    is_theta_name,
    parse_projection,
    projection_name,
)
from attnquant.theta.prefix_map import PrefixMap

GRAPH_PREFIX = "language_model."
"""What every weight's name begins with in the graph, as in MAX's Gemma."""

_LAYER_FAM_RE = re.compile(
    rf"(?P<layer>layers\.\d+)\.(?P<family>{'|'.join(FAMILIES)})\.(?P<factor>U|s|V)"
)

logger = logging.getLogger("max.pipelines.attnquant")


@dataclass(frozen=True)
class Adapted:
    """What the adapter makes of a checkpoint.

    Attributes:
        state_dict: The graph's weights by name.
        layout: Which theta tensors they came from.
        settings: What the model is served with.
        storage: What projections, embedding and head are stored in, where it is not
            the model's dtype.
    """

    state_dict: dict[str, WeightData]
    layout: ThetaLayout
    settings: Settings
    storage: DType | None = None


@dataclass(frozen=True)
class WeightAdapter:
    """Adapts one architecture's weights, as its plugin's hooks say.

    Attributes:
        architecture: Its name.
    """

    architecture: str

    def __call__(
        self, state_dict: Mapping[str, Any], huggingface_config: Any, **_: object
    ) -> dict[str, WeightData]:
        """Adapt as MAX's own adapters do, in the checkpoint's dtype.

        See `adapt`, which the pipeline model calls: it knows the model's dtype.
        """
        weights = {name: weight.data() for name, weight in state_dict.items()}
        return self.adapt(weights, huggingface_config, dtype=None).state_dict

    def adapt(
        self,
        weights: Mapping[str, WeightData],
        huggingface_config: Any,
        dtype: DType | None,
        settings: Settings | None = None,
    ) -> Adapted:
        """Turn a checkpoint's or a bundle's tensors into the graph's.

        Args:
            weights: Tensors by name, as in the files.
            huggingface_config: The decoder's config, as transformers gives it.
            dtype: The model's dtype; None leaves each tensor in its own.
            settings: By default those of the environment and the bundle.

        Raises:
            AttnQuantError: If names, shapes, values or settings do not fit; nothing
                is guessed or left out.
        """
        clock = Stopwatch()
        config = huggingface_config.to_dict()
        supplied = installed_plugins().find(self.architecture)
        num_layers = int(huggingface_config.num_hidden_layers)
        bundle = bundle_of(huggingface_config)
        settings = settings or resolve_settings(num_layers, bundle)
        if bundle is not None:
            _check_bundle(weights, bundle)
            canonical, layout = dict(weights), bundle.layout
        else:
            canonical = _canonical(weights, supplied.prefix_map(config))
            grouping = supplied.grouping(config)
            layout = _layout(canonical, grouping, num_layers, settings)
        if getattr(huggingface_config, "tie_word_embeddings", False):
            # A copy of the embedding, which the graph's head shares.
            canonical.pop("lm_head.weight", None)
        clock.lap("weights")
        theta, kept = _theta(canonical, layout, decomposed=bundle is not None)
        clock.lap("weights" if bundle else "decomposition")
        if use_precomputed_weff_outside(settings.formulation):
            arrays = {name: _array(value) for name, value in theta.items()}
            theta = dict(precompute_weff_outside_graph(arrays, layout))
        found = {**theta, **kept}
        storage = _storage(found, settings, dtype)
        adapted = {
            GRAPH_PREFIX + _nested(name): _weight(
                _nested(name), value, storage if _is_stored(name) else dtype
            )
            for name, value in found.items()
        }
        clock.lap("weights")
        log_weights(supplied, num_layers, settings, _bytes(adapted, layout), clock)
        if doubt := doubtful(layout, bundle):
            logger.warning("AttnQuant: %s", doubt)
        return Adapted(adapted, layout, settings, storage)


def _bytes(adapted: Mapping[str, WeightData], layout: ThetaLayout) -> tuple[int, int]:
    """Return what the weights take, and would take with projections multiplied out."""
    sizes = {
        name: math.prod(_Shaped(weight).shape) * weight.dtype.size_in_bytes
        for name, weight in adapted.items()
    }
    served = sum(sizes.values())
    theta = {GRAPH_PREFIX + _nested(name) for name in layout.tensors()}
    if not theta <= sizes.keys():
        # They are multiplied out already.
        return served, served
    dense = sum(
        sizes[GRAPH_PREFIX + base_name(*base)] * len(layers)
        for base, layers in layout.bases.items()
    )
    return served, served - sum(sizes[name] for name in theta) + dense


def _canonical(
    weights: Mapping[str, WeightData], prefix_map: PrefixMap
) -> dict[str, WeightData]:
    return {
        name.removeprefix(GRAPH_PREFIX): weights[source]
        for name, source in prefix_map.rename(weights).items()
    }


def _layout(
    canonical: Mapping[str, WeightData],
    grouping: Grouping,
    num_layers: int,
    settings: Settings,
) -> ThetaLayout:
    shapes = _projection_shapes(canonical)
    try:
        if settings.requested_rank:
            check_rank_bound(
                settings.requested_rank,
                {projection_name(*key): shape for key, shape in shapes.items()},
            )
        return make_layout(
            shapes,
            num_layers=num_layers,
            shared_blocks=settings.shared_blocks,
            lora_rank=settings.lora_rank or None,
            tie_families=settings.tie_families,
            grouping=grouping,
        )
    except SettingError as error:
        raise error.renamed(_VARIABLES) from error


def _projection_shapes(
    canonical: Mapping[str, WeightData],
) -> dict[ProjectionKey, tuple[int, ...]]:
    return projection_shapes(
        {name: _Shaped(weight) for name, weight in canonical.items()}
    )


class _Shaped:
    """A weight's shape as plain integers."""

    def __init__(self, weight: WeightData) -> None:
        self.shape = tuple(int(dim) for dim in weight.shape)


_VARIABLES = {
    "lora_rank": RANK.name,
    "shared_blocks": BLOCKS.name,
    "tie_families": TIE.name,
}
"""How the user who serves a raw checkpoint knows a setting."""


def _check_bundle(weights: Mapping[str, WeightData], bundle: BundleInfo) -> None:
    found = {
        name: (weight.dtype.name, _Shaped(weight).shape)
        for name, weight in weights.items()
    }
    check_tensors(bundle.tensors(), found)


def _theta(
    canonical: Mapping[str, WeightData], layout: ThetaLayout, *, decomposed: bool
) -> tuple[dict[str, WeightData | Array], dict[str, WeightData]]:
    """Return theta tensors and all others; decompose if that is still to be done."""
    if decomposed:
        names = layout.tensors()
        return (
            {name: canonical[name] for name in names},
            {name: canonical[name] for name in canonical if name not in names},
        )
    arrays = WeightArrays(canonical)
    dtype = common_storage_dtype(
        canonical[projection_name(*key)].dtype.name
        for key in _projection_shapes(canonical)
    )
    theta: dict[str, WeightData | Array] = {}
    for part in iter_decomposed(arrays, layout, dtype):
        theta.update(part.tensors)
    return theta, {name: canonical[name] for name in kept_names(canonical, layout)}


def _nested(name: str) -> str:
    """Turn ``layers.3.q_proj.U`` into ``layers.3.self_attn.q_proj.U``."""
    if not (match := _LAYER_FAM_RE.fullmatch(name)):
        return name
    module = module_of(match["family"])
    return f"{match['layer']}.{module}.{match['family']}.{match['factor']}"


def _is_stored(name: str) -> bool:
    """Return whether a tensor is one that the op of `fused` widens by itself."""
    return (
        is_theta_name(name)
        or parse_projection(name) is not None
        or name in {"embed_tokens.weight", "lm_head.weight"}
    )


def _storage(
    tensors: Mapping[str, WeightData | Array], settings: Settings, dtype: DType | None
) -> DType | None:
    """Return the dtype that stored tensors keep: bfloat16, if all of them are in it.

    MAX computes in float32 on a CPU; the op widens in registers, exactly, so that
    bfloat16 only halves the memory that is read. Elsewhere tensors are cast to the
    model's dtype.
    """
    if dtype != DType.float32 or not use_fused_formulation(settings.formulation):
        return dtype
    narrow = all(
        value.dtype in (DType.bfloat16, BFLOAT16)
        for name, value in tensors.items()
        if _is_stored(name)
    )
    return DType.bfloat16 if narrow else dtype


def _array(value: WeightData | Array) -> Array:
    if isinstance(value, WeightData):
        return WeightArrays({"": value})[""]
    return value


def _weight(name: str, value: WeightData | Array, dtype: DType | None) -> WeightData:
    weight = value if isinstance(value, WeightData) else to_weight(name, value)
    if dtype is not None and not weight.dtype.is_float():
        raise CheckpointError(
            name, expected="a floating-point dtype", found=weight.dtype.name
        )
    return weight if dtype is None else cast(weight, dtype)
