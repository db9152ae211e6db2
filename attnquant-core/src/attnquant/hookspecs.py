"""The plugin contract: five hooks, in the order in which data meets them.

A plugin is a module (or any object) that implements these hooks with `hookimpl` and is
named by an entry point in the group `attnquant.models`. A plugin may supply several
architectures; every hook but the first is told which one is meant. Hooks 1 to 3 are
all that the offline commands use and must work where MAX is not installed; hooks 4 and
5 import MAX inside the call. As usual with pluggy, an implementation may leave out
arguments that it does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from attnquant.theta.grouping import UNNAMED, Group, Grouping, NoBase, uniform
from attnquant.theta.prefix_map import PrefixMap

if TYPE_CHECKING:
    from max.dtype import DType
    from max.graph import DeviceRef
    from max.nn.kv_cache import KVCacheParamInterface
    from max.nn.layer import Module
    from max.pipelines.lib import KVCacheConfig, PipelineConfig

__all__ = [
    "ENTRY_POINT_GROUP",
    "PLUGIN_API_VERSION",
    "UNNAMED",
    "Architecture",
    "AttentionFactory",
    "Group",
    "Grouping",
    "NoBase",
    "PrefixMap",
    "hookimpl",
    "hookspec",
    "uniform",
]

ENTRY_POINT_GROUP = "attnquant.models"
PLUGIN_API_VERSION = 1
"""The version of this contract. A plugin says which one it was written for."""

hookspec = pluggy.HookspecMarker("attnquant")
hookimpl = pluggy.HookimplMarker("attnquant")


@dataclass(frozen=True)
class Architecture:
    """An architecture that a plugin supplies.

    Attributes:
        name: As in the ``architectures`` of a checkpoint's `config.json`.
        target: ``module:attribute`` of its MAX `SupportedArchitecture`, imported only
            when MAX asks for it.
        api_version: The `PLUGIN_API_VERSION` the plugin was written for.
        tested_max: The range of MAX versions it was tested with, as in a requirement
            (``>=26.7,<26.8``); outside it the plugin is not used. Empty for any.
    """

    name: str
    target: str
    api_version: int
    tested_max: str = ""


class AttentionFactory(Protocol):
    """Builds the attention of one layer around given projections."""

    def __call__(self, layer: int, projections: Mapping[str, Any]) -> Module:
        """Return layer `layer`'s attention; `projections` holds linears by family."""
        ...


@hookspec(firstresult=True)
def attnquant_architectures() -> Sequence[Architecture]:
    """Name the architectures this plugin supplies."""
    raise NotImplementedError


@hookspec(firstresult=True)
def attnquant_prefix_map(architecture: str, config: Mapping[str, Any]) -> PrefixMap:
    """Map checkpoint prefixes to canonical names (``layers.{i}.self_attn...``).

    `config` is the checkpoint's `config.json`. A tensor that nothing maps is an error
    that names it, unless the map lists it as ignored.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def attnquant_w0_group(
    architecture: str, config: Mapping[str, Any]
) -> Callable[[int, str], Group]:
    """Return the W0 grouping key: (layer, family) to a group.

    `config` is the decoder's part of `config.json`. A group is a name, ``UNNAMED``, or
    ``NoBase.DENSE`` / ``NoBase.ABSENT``. Layers of different groups share no base.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def attnquant_attention(architecture: str, config: Any) -> AttentionFactory:
    """Return the attention layer factory for a model config (the plugin's own class).

    What the layers share (rotary tables, say) is built once, here.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def attnquant_kv_params(  # noqa: PLR0917 (hooks are called by keyword only)
    architecture: str,
    huggingface_config: Any,
    pipeline_config: PipelineConfig,
    devices: list[DeviceRef],
    kv_cache_config: KVCacheConfig,
    cache_dtype: DType,
) -> KVCacheParamInterface:
    """Return the KV cache layout for a config."""
    raise NotImplementedError
