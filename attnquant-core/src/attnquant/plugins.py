"""Discovery: installed plugins, each in a state, none able to stop another."""

from __future__ import annotations

import difflib
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnquant import settings
from attnquant.distributions import MetadataProblem, find_installed, normalised
from attnquant.errors import ArchitectureError, AttnQuantError, PluginError
from attnquant.hookspecs import Architecture, AttentionFactory
from attnquant.loading import load
from attnquant.states import Plugin, State
from attnquant.theta.grouping import Grouping
from attnquant.theta.prefix_map import PrefixMap

__all__ = [
    "Plugin",
    "PluginSet",
    "State",
    "Supplied",
    "find_plugins",
    "installed_plugins",
]


@dataclass(frozen=True)
class Supplied:
    """An architecture together with the loaded plugin that supplies it."""

    architecture: Architecture
    plugin: Plugin

    def prefix_map(self, config: Mapping[str, Any]) -> PrefixMap:
        """Return the prefix map for a `config.json`."""
        result: PrefixMap = self._call("attnquant_prefix_map", PrefixMap, config=config)
        return result

    def grouping(self, text_config: Mapping[str, Any]) -> Grouping:
        """Return the W0 grouping key for the decoder's config."""
        result: Grouping = self._call(
            "attnquant_w0_group", Callable, config=text_config
        )
        return result

    def attention_factory(self, config: object) -> AttentionFactory:
        """Return the attention layer factory for a model config."""
        result: AttentionFactory = self._call(
            "attnquant_attention", Callable, config=config
        )
        return result

    def kv_params(self, **arguments: object) -> Any:
        """Return the KV cache layout; arguments as in the hook spec."""
        return self._call("attnquant_kv_params", object, **arguments)

    def _call(self, name: str, kind: Any, **arguments: object) -> Any:
        subject = f"plugin {self.plugin.name} ({self.plugin.distribution}), hook {name}"
        expected = f"a {getattr(kind, '__name__', kind)} for {self.architecture.name}"
        try:
            result = getattr(self.plugin.hook, name)(
                architecture=self.architecture.name, **arguments
            )
        except AttnQuantError:
            raise
        except Exception as error:
            raise PluginError(
                subject, expected=expected, found=f"{type(error).__name__}: {error}"
            ) from error
        if result is None or not isinstance(result, kind):
            raise PluginError(subject, expected=expected, found=repr(result))
        return result


@dataclass(frozen=True)
class PluginSet:
    """All plugins that were found.

    Attributes:
        plugins: By name.
        problems: Metadata that should not be where they are.
    """

    plugins: tuple[Plugin, ...]
    problems: tuple[MetadataProblem, ...] = ()

    @property
    def identities(self) -> tuple[str, ...]:
        """One line for each loaded plugin; see `Plugin.identity`."""
        return tuple(
            plugin.identity for plugin in self.plugins if plugin.state is State.LOADED
        )

    @property
    def digest(self) -> str:
        """A digest of the loaded plugins, the same in every process that has them."""
        return hashlib.sha256("\n".join(self.identities).encode()).hexdigest()

    @property
    def supplied(self) -> dict[str, Supplied]:
        """The usable architectures by name."""
        return {
            architecture.name: Supplied(architecture, plugin)
            for plugin in self.plugins
            if plugin.state is State.LOADED
            for architecture in plugin.architectures
        }

    def find(self, architecture: str) -> Supplied:
        """Return who supplies an architecture.

        Raises:
            ArchitectureError: If nobody does; it says why, plugin by plugin.
        """
        supplied = self.supplied
        if architecture in supplied:
            return supplied[architecture]
        raise ArchitectureError(
            architecture,
            expected="one of " + (", ".join(sorted(supplied)) or "none (no plugin)"),
            found="an architecture that no loaded plugin supplies",
            hint=self.explain(),
        )

    def explain(self) -> str:
        """Say in a few sentences why some plugin is not there."""
        if not self.plugins:
            return (
                "No AttnQuant plugin is installed: install the package of your model,"
                " for example `pip install attnquant-gemma3`."
            )
        troubled = [
            f"Plugin {plugin.name} ({plugin.origin}) is {plugin.state.value}:"
            f" {plugin.reason}"
            for plugin in self.plugins
            if plugin.state is not State.LOADED
        ]
        return " ".join(troubled) or (
            "Every installed plugin is loaded; see `attnquant plugins`, and install"
            " the package that supplies this architecture."
        )


def find_plugins(environ: Mapping[str, str] | None = None) -> PluginSet:
    """Discover plugins from installed metadata, and load those that are enabled.

    Args:
        environ: By default the process's environment; `ATTNQUANT_PLUGINS`,
            `ATTNQUANT_DISABLE` and `ATTNQUANT_PIN` are read from it.

    Raises:
        SettingError: If one of these variables is malformed. A plugin's own failure
            raises nothing: it becomes that plugin's state.
    """
    environ = os.environ if environ is None else environ
    allowed = settings.PLUGINS.read(environ)
    disabled = settings.DISABLE.read(environ)
    pins = settings.PIN.read(environ)
    installed = find_installed()
    plugins = []
    for declared in sorted(
        installed.declared, key=lambda item: (item.point.name, item.distribution)
    ):
        plugin = Plugin(
            name=declared.point.name,
            distribution=declared.distribution,
            version=declared.version,
            entry_point=declared.point.value,
        )
        plugins.append(plugin)
        if isinstance(allowed, tuple) and plugin.name not in allowed:
            plugin.set_state(State.DISABLED, f"not in {settings.PLUGINS.name}.")
        elif isinstance(disabled, tuple) and plugin.name in disabled:
            plugin.set_state(State.DISABLED, f"named in {settings.DISABLE.name}.")
        else:
            load(plugin, declared)
    plugins += [_unreadable(problem) for problem in installed.problems if problem.lost]
    _settle_conflicts(plugins, pins if isinstance(pins, dict) else {})
    if isinstance(allowed, tuple):
        plugins += _not_installed(allowed, [plugin.name for plugin in plugins])
    return PluginSet(tuple(plugins), installed.problems)


@functools.cache
def installed_plugins() -> PluginSet:
    """Return the plugins of this process's environment, found once."""
    return find_plugins()


def _settle_conflicts(plugins: Iterable[Plugin], pins: Mapping[str, str]) -> None:
    claims: dict[str, list[Plugin]] = {}
    for plugin in plugins:
        if plugin.state is State.LOADED:
            for architecture in plugin.architectures:
                claims.setdefault(architecture.name, []).append(plugin)
    for name, claimants in claims.items():
        if len(claimants) == 1:
            continue
        names = " and ".join(f"{p.distribution} ({p.name})" for p in claimants)
        pin = f"{settings.PIN.name}={name}="
        pinned = [p for p in claimants if _same_name(p.distribution, pins.get(name))]
        for plugin in claimants:
            if len(pinned) != 1:
                wrong = f"; {pin}{pins[name]} decides nothing" if name in pins else ""
                plugin.set_state(
                    State.CONFLICT,
                    f"{names} both claim {name}. Uninstall one, or set"
                    f" {pin}<distribution>{wrong}.",
                )
            elif plugin is not pinned[0]:
                plugin.set_state(
                    State.DISABLED, f"{pin}{pins[name]} prefers another to it."
                )


def _unreadable(problem: MetadataProblem) -> Plugin:
    """Return a plugin in trouble for a distribution of unreadable metadata."""
    plugin = Plugin(problem.lost, problem.lost, "unknown", "")
    plugin.set_state(
        State.FAILED,
        f"{problem.path}: {problem.text}. Reinstall {problem.lost}, or remove what is"
        f" left of it: {problem.remedy}",
    )
    return plugin


def _not_installed(allowed: Iterable[str], names: Sequence[str]) -> list[Plugin]:
    """Return a plugin in trouble for each allowed name that nothing declares."""
    found = []
    for name in allowed:
        if name in names:
            continue
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        plugin = Plugin(name, "not installed", "", "")
        plugin.set_state(
            State.FAILED,
            f"named in {settings.PLUGINS.name}, but no installed distribution declares"
            f" a plugin of this name (there are: {', '.join(names) or 'none'}).{hint}"
            " Install the package that does, or correct the variable.",
        )
        found.append(plugin)
    return found


def _same_name(distribution: str, other: str | None) -> bool:
    """Compare as package indexes do: case and ``-_.`` make no difference."""
    return other is not None and normalised(distribution) == normalised(other)
