"""Discovery: installed plugins, each in a state, none able to stop another."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import importlib_metadata
import pluggy

from attnquant import hookspecs, settings
from attnquant.errors import ArchitectureError, AttnQuantError, PluginError
from attnquant.hookspecs import (
    ENTRY_POINT_GROUP,
    PLUGIN_API_VERSION,
    Architecture,
    AttentionFactory,
)
from attnquant.theta.grouping import Grouping
from attnquant.theta.prefix_map import PrefixMap


class State(enum.Enum):
    """What became of a plugin."""

    LOADED = "loaded"
    DISABLED = "disabled"
    INCOMPATIBLE = "incompatible"
    MISSING_DEPENDENCY = "missing dependency"
    FAILED = "failed"
    CONFLICT = "conflict"


@dataclass
class Plugin:
    """One entry point in the group `attnquant.models`, and what became of it.

    Attributes:
        name: The entry point's name.
        distribution: The distribution that declares it.
        version: That distribution's version.
        entry_point: ``module`` or ``module:attribute``.
        state: See `State`.
        reason: Why it is in that state, and what to do; empty when loaded.
        architectures: What it supplies, as far as it got to say.
        exception: What it raised, if it did.
        load_seconds: How long importing it took.
        hook: Its hooks, to be called with keyword arguments.
    """

    name: str
    distribution: str
    version: str
    entry_point: str
    state: State = State.LOADED
    reason: str = ""
    architectures: tuple[Architecture, ...] = ()
    exception: BaseException | None = None
    load_seconds: float = 0.0
    hook: pluggy.HookRelay | None = field(default=None, repr=False)

    def set_state(
        self, state: State, reason: str, exception: BaseException | None = None
    ) -> None:
        """Move to a state other than loaded; the reason becomes one line."""
        self.state, self.exception = state, exception
        self.reason = " ".join(reason.split())


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
    """All plugins that were found."""

    plugins: tuple[Plugin, ...]

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
            f"Plugin {plugin.name} ({plugin.distribution} {plugin.version}) is"
            f" {plugin.state.value}: {plugin.reason}"
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
    found = [
        _describe(point)
        for point in importlib_metadata.entry_points(group=ENTRY_POINT_GROUP)
    ]
    found.sort(key=lambda pair: (pair[0].name, pair[0].distribution))
    for plugin, point in found:
        if isinstance(allowed, tuple) and plugin.name not in allowed:
            plugin.set_state(State.DISABLED, f"not in {settings.PLUGINS.name}.")
        elif isinstance(disabled, tuple) and plugin.name in disabled:
            plugin.set_state(State.DISABLED, f"named in {settings.DISABLE.name}.")
        else:
            _load(plugin, point)
    plugins = tuple(plugin for plugin, _ in found)
    _settle_conflicts(plugins, pins if isinstance(pins, dict) else {})
    return PluginSet(plugins)


@functools.cache
def installed_plugins() -> PluginSet:
    """Return the plugins of this process's environment, found once."""
    return find_plugins()


def _describe(
    point: importlib_metadata.EntryPoint,
) -> tuple[Plugin, importlib_metadata.EntryPoint]:
    metadata: Any = (point.dist.metadata if point.dist else None) or {}
    return (
        Plugin(
            name=point.name,
            distribution=metadata.get("Name") or "unknown",
            version=metadata.get("Version") or "unknown",
            entry_point=point.value,
        ),
        point,
    )


def _load(plugin: Plugin, point: importlib_metadata.EntryPoint) -> None:
    started = time.perf_counter()
    implementation: Any = None
    try:
        implementation = point.load()
        manager = pluggy.PluginManager("attnquant")
        manager.add_hookspecs(hookspecs)
        manager.register(implementation, name=plugin.name)
        manager.check_pending()
        plugin.hook = manager.hook
        plugin.architectures = _architectures(plugin, manager.hook)
    except ModuleNotFoundError as error:
        own = point.module.partition(".")[0]
        if error.name and error.name.partition(".")[0] == own:
            reason = (
                f"its entry point {point.value} names a module that does not exist"
                f" ({error.name}). Reinstall {plugin.distribution}."
            )
            plugin.set_state(State.FAILED, reason, error)
        else:
            reason = f"{error}. Reinstall {plugin.distribution} with what it needs."
            plugin.set_state(State.MISSING_DEPENDENCY, reason, error)
    except pluggy.PluginValidationError as error:
        plugin.set_state(State.FAILED, f"{error}.", error)
        # The hooks of another API version may well look wrong; then that is why.
        with contextlib.suppress(Exception):
            plugin.architectures = _architectures(plugin, implementation)
            _check_version(plugin)
    except PluginError as error:
        plugin.set_state(State.FAILED, str(error), error)
    # Whatever a third party's module raises while it is imported must stay its own
    # affair; the exception is kept and shown.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        plugin.set_state(State.FAILED, f"{type(error).__name__}: {error}.", error)
    else:
        _check_version(plugin)
    plugin.load_seconds = time.perf_counter() - started


def _architectures(plugin: Plugin, hooks: Any) -> tuple[Architecture, ...]:
    found: object = hooks.attnquant_architectures()
    if (
        not isinstance(found, Sequence)
        or not found
        or not all(
            isinstance(item, Architecture) and isinstance(item.api_version, int)
            for item in found
        )
    ):
        raise PluginError(
            f"plugin {plugin.name}, hook attnquant_architectures",
            expected="at least one attnquant.hookspecs.Architecture (api_version: int)",
            found=repr(found),
        )
    return tuple(found)


def _check_version(plugin: Plugin) -> None:
    for architecture in plugin.architectures:
        if architecture.api_version != PLUGIN_API_VERSION:
            older = architecture.api_version < PLUGIN_API_VERSION
            upgrade = plugin.distribution if older else "attnquant-core"
            plugin.set_state(
                State.INCOMPATIBLE,
                f"written for plugin API {architecture.api_version}, and"
                f" attnquant-core has {PLUGIN_API_VERSION}. Upgrade {upgrade}.",
            )


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


def _same_name(distribution: str, other: str | None) -> bool:
    """Compare as package indexes do: case and ``-_.`` make no difference."""
    return other is not None and _normalised(distribution) == _normalised(other)


def _normalised(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
