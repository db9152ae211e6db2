"""Collected architectures into MAX's registry, MAX's own entries out of the way."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from attnquant.errors import ArchitectureError, PluginError, ServingError
from attnquant.hookspecs import Architecture
from attnquant.plugins import PluginSet, State, Supplied, installed_plugins

if TYPE_CHECKING:
    from max.pipelines.lib import SupportedArchitecture

TESTED_MAX = ">=26.7,<26.8"
"""The range of MAX versions this package is tested with."""

# Below MAX's own name, since MAX's console shows no other.
logger = logging.getLogger("max.pipelines.attnquant")


def collect_architectures(
    plugins: PluginSet | None = None,
) -> list[SupportedArchitecture]:
    """Import every supplied architecture and pop MAX's lazy entry of the same name.

    MAX registers what this returns. Its lazy entries for another task under the same
    name stay.

    Args:
        plugins: By default those installed.

    Raises:
        ArchitectureError: If there is none at all; it says why, plugin by plugin.
        ServingError: If this version of MAX keeps its registry elsewhere.
    """
    plugins = installed_plugins() if plugins is None else plugins
    architectures = []
    for supplied in plugins.supplied.values():
        architecture = _import_architecture(supplied)
        if architecture is not None:
            pop_lazy_entry(architecture)
            architectures.append(architecture)
    for plugin in plugins.plugins:
        if plugin.state not in {State.LOADED, State.DISABLED}:
            logger.warning(
                "AttnQuant plugin %s (%s %s) is %s: %s",
                plugin.name,
                plugin.distribution,
                plugin.version,
                plugin.state.value,
                plugin.reason,
            )
    if not architectures:
        raise ArchitectureError(
            "attnquant.ARCHITECTURES",
            expected="at least one loaded plugin",
            found="none",
            hint=plugins.explain(),
        )
    return architectures


def pop_lazy_entry(architecture: SupportedArchitecture) -> None:
    """Remove MAX's deferred entry for an architecture's name and task.

    Raises:
        ServingError: If the (private) table is not where MAX 26.7 has it.
    """
    from max.pipelines.lib import PIPELINE_REGISTRY

    table = getattr(PIPELINE_REGISTRY, "_lazy_architectures", None)
    if not isinstance(table, dict):
        raise ServingError(
            "max.pipelines.lib.PIPELINE_REGISTRY._lazy_architectures",
            expected=f"a dict, as in MAX {TESTED_MAX}",
            found=type(table).__name__,
            hint=f'Install "max[serve]{TESTED_MAX}".',
        )
    if architecture.name not in table:
        return
    others = [
        entry
        for entry in table[architecture.name]
        if _task_of(entry) != architecture.task
    ]
    if others:
        table[architecture.name] = others
    else:
        del table[architecture.name]


def _task_of(entry: tuple[str, str, str | None]) -> object:
    # Which task an entry serves stands nowhere but in the declaration itself.
    module, symbol, package = entry
    return getattr(importlib.import_module(module, package), symbol).task


def _import_architecture(supplied: Supplied) -> SupportedArchitecture | None:
    plugin = supplied.plugin
    try:
        return _resolve_target(supplied.architecture)
    except ModuleNotFoundError as error:
        plugin.set_state(State.MISSING_DEPENDENCY, f"{error}.", error)
    # A third party's module again: see attnquant.plugins.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        plugin.set_state(State.FAILED, f"{type(error).__name__}: {error}", error)
    return None


def _resolve_target(architecture: Architecture) -> SupportedArchitecture:
    from max.pipelines.lib import SupportedArchitecture

    module, _, attribute = architecture.target.partition(":")
    declaration = getattr(importlib.import_module(module), attribute)
    if (
        not isinstance(declaration, SupportedArchitecture)
        or declaration.name != architecture.name
    ):
        raise PluginError(
            architecture.target,
            expected="the SupportedArchitecture of " + architecture.name,
            found=repr(getattr(declaration, "name", declaration)),
        )
    return declaration
