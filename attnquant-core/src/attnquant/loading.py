"""Loading one plugin: importing it, checking it against the contract, its state."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import importlib_metadata
import pluggy
from packaging.specifiers import SpecifierSet

from attnquant import hookspecs
from attnquant.distributions import Declared
from attnquant.errors import PluginError
from attnquant.hookspecs import PLUGIN_API_VERSION, Architecture
from attnquant.states import Plugin, State

HOOKS: Mapping[str, Any] = {
    name: hook
    for name, hook in vars(hookspecs).items()
    if name.startswith("attnquant_")
}
"""The hook specifications by name."""

_CLOSE = 0.8
"""How much alike two names are that one is taken for the other misspelled."""

_MARK = "attnquant_impl"
"""The attribute by which pluggy knows an implementation."""


def load(plugin: Plugin, declared: Declared) -> None:
    """Import a plugin and put it into its state; nothing it raises gets out.

    Args:
        plugin: What is known of it; its state, architectures and hooks are set.
        declared: Its entry point.
    """
    started = time.perf_counter()
    implementation: Any = None
    try:
        implementation = declared.point.load()
        plugin.hook = _register(plugin, implementation)
        plugin.architectures = _architectures(plugin, plugin.hook)
        _check_version(plugin)
        _check_max(plugin)
    except KeyboardInterrupt:
        raise
    except ModuleNotFoundError as error:
        plugin.set_state(*_missing(plugin, declared, error), error)
    except (pluggy.PluginValidationError, PluginError) as error:
        plugin.set_state(State.FAILED, str(error), error)
        # The hooks of another API version may well look wrong; then that is why.
        with contextlib.suppress(Exception):
            plugin.architectures = _architectures(plugin, implementation)
            _check_version(plugin)
    # Whatever a third party's module raises while it is imported must stay its own
    # affair, SystemExit and its kin included; the exception is kept and shown.
    except BaseException as error:  # noqa: BLE001
        plugin.set_state(State.FAILED, _told(plugin, error), error)
    plugin.load_seconds = time.perf_counter() - started


def _missing(
    plugin: Plugin, declared: Declared, error: ModuleNotFoundError
) -> tuple[State, str]:
    own = declared.point.module.partition(".")[0]
    if error.name and error.name.partition(".")[0] == own:
        return State.FAILED, (
            f"its entry point {declared.point.value} names a module that does not"
            f" exist ({error.name}). Reinstall {plugin.distribution}, or remove what is"
            f" left of it: {declared.path}"
        )
    reason = f"{error}. Reinstall {plugin.distribution} with what it needs."
    return State.MISSING_DEPENDENCY, reason


def _told(plugin: Plugin, error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".removesuffix(": ").rstrip(".")
    return f"{text}. Upgrade or reinstall {plugin.distribution}."


# --- the contract ----------------------------------------------------------------


def _register(plugin: Plugin, implementation: Any) -> pluggy.HookRelay:
    """Check names and signatures, and return the hooks."""
    for name, function in _functions(implementation):
        _check_hook(plugin, name, function)
    manager = pluggy.PluginManager("attnquant")
    manager.add_hookspecs(hookspecs)
    manager.register(implementation, name=plugin.name)
    return manager.hook


def _functions(implementation: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions of a module or object that may be meant as hooks."""
    for name, value in inspect.getmembers_static(implementation):
        function = getattr(value, "__func__", value)
        if inspect.isroutine(function) and not name.startswith("__"):
            yield name, function


def _check_hook(plugin: Plugin, name: str, function: Any) -> None:
    subject = f"plugin {plugin.name}, hook {name}"
    marked = hasattr(function, _MARK)
    if name not in HOOKS:
        close = difflib.get_close_matches(name.lower(), HOOKS, n=1, cutoff=_CLOSE)
        if marked or close:
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise PluginError(
                subject,
                expected="one of " + ", ".join(HOOKS),
                found=f"unknown hook {name}{hint}",
            )
    elif not marked:
        raise PluginError(
            subject,
            expected="a function marked with @hookimpl of attnquant.hookspecs",
            found="one that is not marked, and that nobody would call",
        )
    if marked:
        _check_signature(subject, name, function)


def _check_signature(subject: str, name: str, function: Any) -> None:
    known = list(inspect.signature(HOOKS[name]).parameters)
    for parameter in inspect.signature(function).parameters.values():
        text = str(parameter)
        if parameter.kind not in {
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
        }:
            raise PluginError(
                subject,
                expected="plain arguments among " + ", ".join(known),
                found=f"{text}, which would not be passed",
            )
        if parameter.name in known and parameter.default is not parameter.empty:
            raise PluginError(
                subject,
                expected=f"{parameter.name} without a default",
                found=f"{text}, for which nothing but the default would be passed",
            )


def _architectures(plugin: Plugin, hooks: Any) -> tuple[Architecture, ...]:
    found: object = hooks.attnquant_architectures()
    if (
        not isinstance(found, Sequence)
        or not found
        or not all(_is_architecture(item) for item in found)
    ):
        raise PluginError(
            f"plugin {plugin.name}, hook attnquant_architectures",
            expected="at least one attnquant.hookspecs.Architecture (a name, a target"
            " module:attribute, api_version: int, tested_max: str)",
            found=repr(found),
        )
    names = [item.name for item in found]
    if len(names) > len(set(names)):
        raise PluginError(
            f"plugin {plugin.name}, hook attnquant_architectures",
            expected="each architecture once",
            found=", ".join(names),
        )
    return tuple(found)


def _is_architecture(item: object) -> bool:
    return (
        isinstance(item, Architecture)
        and type(item.api_version) is int
        and all(isinstance(x, str) for x in (item.name, item.target, item.tested_max))
        and bool(item.name)
        and all(item.target.partition(":"))
    )


# --- versions --------------------------------------------------------------------


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


def max_version() -> str | None:
    """Return the installed version of MAX, which is not imported; None without it."""
    try:
        return importlib_metadata.version("max")
    except importlib_metadata.PackageNotFoundError:
        return None


def within(version: str, specifier: str) -> bool:
    """Return whether a version is in a range such as ``>=26.7,<26.8`` (PEP 440).

    Raises:
        ValueError: If either is malformed.
    """
    return SpecifierSet(specifier).contains(version, prereleases=True)


def _check_max(plugin: Plugin) -> None:
    if plugin.state is not State.LOADED:
        return
    for tested in {item.tested_max for item in plugin.architectures} - {""}:
        version = max_version()
        # The offline commands need no MAX.
        if version is None:
            return
        try:
            fits = within(version, tested)
        except ValueError as error:
            raise PluginError(
                f"plugin {plugin.name}, tested_max",
                expected="a range of versions such as >=26.7,<26.8",
                found=repr(tested),
            ) from error
        if not fits:
            plugin.set_state(
                State.INCOMPATIBLE,
                f"tested with MAX {tested}, and {version} is installed. Upgrade"
                f' {plugin.distribution}, or install "max[serve]{tested}".',
            )
