"""Collected architectures into MAX's registry, MAX's own entries out of the way."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnquant import unavailable
from attnquant.errors import ArchitectureError, PluginError, ServingError
from attnquant.hookspecs import Architecture
from attnquant.plugins import Plugin, PluginSet, State, Supplied, installed_plugins

if TYPE_CHECKING:
    from max.pipelines.lib import SupportedArchitecture

TESTED_MAX = ">=26.7,<26.8"
"""The range of MAX versions this package is tested with."""

PLUGIN_SET_VARIABLE = "_ATTNQUANT_PLUGIN_SET"
"""Where a server tells its worker what it loaded: a digest, then a line a plugin."""

LazyEntry = tuple[str, str, str | None]
"""How MAX defers an architecture: module, symbol, package."""


@dataclass(frozen=True)
class _Replaced:
    """What an architecture took the place of."""

    ours: SupportedArchitecture
    lazy: list[LazyEntry]
    eager: SupportedArchitecture | None


_REPLACED: dict[tuple[str, object], _Replaced] = {}
"""By name and task, since MAX's registry is one for the process."""

_REFUSED: dict[str, list[LazyEntry]] = {}
"""MAX's own lazy entries of the architectures whose plugin is in trouble."""

# Below MAX's own name, since MAX's console shows no other.
logger = logging.getLogger("max.pipelines.attnquant")


def collect_architectures(
    plugins: PluginSet | None = None,
) -> list[SupportedArchitecture]:
    """Import every supplied architecture and pop MAX's lazy entry of the same name.

    MAX registers what this returns. Its lazy entries for another task under the same
    name stay. An architecture that only plugins in trouble claim is refused when MAX is
    asked for it, and the refusal says why.

    Args:
        plugins: By default those installed.

    Raises:
        ArchitectureError: If there is none at all; it says why, plugin by plugin.
        ServingError: If this version of MAX keeps its registry elsewhere.
        PluginError: In a spawned process that sees other plugins than its parent.
    """
    plugins = installed_plugins() if plugins is None else plugins
    check_worker(plugins, os.environ)
    architectures = []
    for supplied in plugins.supplied.values():
        architecture = _import_architecture(supplied)
        if architecture is not None:
            _replace(architecture)
            architectures.append(architecture)
    for plugin in plugins.plugins:
        if plugin.state is not State.LOADED:
            # Of one that could not even name its architectures, MAX serves its own, and
            # what that then refuses is explained by this line alone.
            logger.log(
                logging.WARNING if plugin.in_trouble else logging.INFO,
                "AttnQuant plugin %s (%s) is %s: %s",
                plugin.name,
                plugin.origin,
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
    _refuse(plugins)
    return architectures


def unregister_architectures() -> None:
    """Take AttnQuant's architectures out of MAX's registry again.

    MAX's own of the same name and task come back, lazily where they were lazy; those
    for another task are not touched. MAX can register AttnQuant's anew afterwards.

    Raises:
        ServingError: If this version of MAX keeps its registry elsewhere.
    """
    import attnquant

    lookup = _lookup()
    for (name, task), replaced in _REPLACED.items():
        if lookup._architectures_by_task.get((name, task)) is replaced.ours:  # noqa: SLF001
            _take_out(lookup, replaced)
        if replaced.lazy:
            lazy = lookup._lazy_architectures.setdefault(name, [])  # noqa: SLF001
            lazy += [entry for entry in replaced.lazy if entry not in lazy]
    _REPLACED.clear()
    _readmit(lookup)
    lookup._imported_custom_arch_specs.discard(attnquant.__name__)  # noqa: SLF001
    vars(attnquant).pop("ARCHITECTURES", None)


def _refuse(plugins: PluginSet) -> None:
    """Have MAX refuse what only plugins in trouble supply."""
    claims: dict[str, list[Plugin]] = {}
    for plugin in plugins.plugins:
        for architecture in plugin.architectures if plugin.in_trouble else ():
            claims.setdefault(architecture.name, []).append(plugin)
    supplied, lookup = plugins.supplied, _lookup()
    # Those of an earlier call may be in order now.
    _readmit(lookup)
    table = lookup._lazy_architectures  # noqa: SLF001
    for name, claimants in claims.items():
        if name not in supplied:
            _REFUSED[name] = table.get(name, [])
            table[name] = [unavailable.defer(name, claimants)]


def _readmit(lookup: Any) -> None:
    """Put MAX's own entries back in the place of refusals."""
    table = lookup._lazy_architectures  # noqa: SLF001
    for name, entries in _REFUSED.items():
        table.pop(name, None)
        if entries:
            table[name] = entries
    _REFUSED.clear()


def _take_out(lookup: Any, replaced: _Replaced) -> None:
    name, task = replaced.ours.name, replaced.ours.task
    by_task = lookup._architectures_by_task  # noqa: SLF001
    del by_task[name, task]
    if replaced.eager is not None:
        by_task[name, task] = replaced.eager
    if lookup.architectures.get(name) is replaced.ours:
        del lookup.architectures[name]
        left = [found for key, found in by_task.items() if key[0] == name]
        if left:
            lookup.architectures[name] = replaced.eager or left[0]


def pop_lazy_entry(architecture: SupportedArchitecture) -> list[LazyEntry]:
    """Remove MAX's deferred entry for an architecture's name and task.

    Returns:
        What was removed.

    Raises:
        ServingError: If the (private) table is not where MAX 26.7 has it.
    """
    table = _lookup()._lazy_architectures  # noqa: SLF001
    entries = table.get(architecture.name, [])
    popped = [entry for entry in entries if _task_of(entry) == architecture.task]
    if others := [entry for entry in entries if entry not in popped]:
        table[architecture.name] = others
    else:
        table.pop(architecture.name, None)
    return popped


def _lookup() -> Any:
    """Return what holds MAX's tables; they are private, so they are checked."""
    from max.pipelines.lib import PIPELINE_REGISTRY

    lookup = getattr(PIPELINE_REGISTRY, "_arch_lookup", None)
    for name, kind in _TABLES.items():
        if not isinstance(table := getattr(lookup, name, None), kind):
            raise ServingError(
                f"max.pipelines.lib.PIPELINE_REGISTRY.{name}",
                expected=f"a {kind.__name__}, as in MAX {TESTED_MAX}",
                found=type(table).__name__,
                hint=f'Install "max[serve]{TESTED_MAX}".',
            )
    return lookup


_TABLES: dict[str, type] = {
    "architectures": dict,
    "_architectures_by_task": dict,
    "_lazy_architectures": dict,
    "_imported_custom_arch_specs": set,
}


def _replace(architecture: SupportedArchitecture) -> None:
    """Make way for an architecture, remembering what was there."""
    lookup = _lookup()
    key = (architecture.name, architecture.task)
    eager = lookup._architectures_by_task.get(key)  # noqa: SLF001
    lazy = pop_lazy_entry(architecture)
    if known := _REPLACED.get(key):
        known.lazy.extend(lazy)
    else:
        eager = None if eager is architecture else eager
        _REPLACED[key] = _Replaced(architecture, lazy, eager)


def _task_of(entry: LazyEntry) -> object:
    # Which task an entry serves stands nowhere but in the declaration itself.
    module, symbol, package = entry
    return getattr(importlib.import_module(module, package), symbol).task


def check_worker(plugins: PluginSet, environ: MutableMapping[str, str]) -> None:
    """Make sure that a spawned worker has the plugins of the process that spawned it.

    MAX collects architectures in the server, and its worker gets a model's class by
    name. The server leaves what it loaded in its environment, and the worker compares.

    Args:
        plugins: What this process loaded.
        environ: The process's environment.

    Raises:
        PluginError: In a worker that has loaded others, naming the difference.
    """
    here = plugins.identities
    told = environ.get(PLUGIN_SET_VARIABLE)
    if multiprocessing.parent_process() is None or told is None:
        environ[PLUGIN_SET_VARIABLE] = "\n".join([plugins.digest, *here])
        return
    digest, *there = told.split("\n")
    if digest == plugins.digest:
        return
    raise PluginError(
        "the plugins of the serving worker",
        expected=f"those of the server ({digest[:12]}): "
        + ("; ".join(sorted(set(there) - set(here))) or "none besides"),
        found=f"others ({plugins.digest[:12]}): "
        + ("; ".join(sorted(set(here) - set(there))) or "none besides"),
        hint=f"Both must see the same installation. {plugins.explain()}",
    )


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
