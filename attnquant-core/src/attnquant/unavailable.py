"""Architectures whose plugin is in trouble: MAX is refused them, and told why.

MAX imports a deferred architecture when it is asked for, as ``module`` and ``symbol``.
In the place of its own of that name `defer` puts one whose symbol, on this module,
raises the reason. So an architecture that a broken plugin claims is not served by MAX's
own instead, which knows no theta bundles, while every other one is served as ever.
"""

from __future__ import annotations

from collections.abc import Sequence

from attnquant import settings
from attnquant.errors import ArchitectureError
from attnquant.states import Plugin

_CLAIMANTS: dict[str, tuple[Plugin, ...]] = {}
"""The plugins, none of them loaded, that supply an architecture; one table for the
process, since MAX's registry is one."""


def defer(architecture: str, plugins: Sequence[Plugin]) -> tuple[str, str, None]:
    """Return what MAX is to import for an architecture.

    Args:
        architecture: Its name.
        plugins: Those that claim it, all in trouble.
    """
    _CLAIMANTS[architecture] = tuple(plugins)
    return __name__, architecture, None


def __getattr__(name: str) -> object:
    """Refuse an architecture (PEP 562).

    Raises:
        ArchitectureError: Saying why it is unavailable, and what mends that.
    """
    if name not in _CLAIMANTS:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    plugins = _CLAIMANTS[name]
    reasons = dict.fromkeys(plugin.reason for plugin in plugins)
    names = ",".join(plugin.name for plugin in plugins)
    raise ArchitectureError(
        name,
        expected="a plugin that is loaded",
        found=" and ".join(
            f"{plugin.name} ({plugin.origin}), which is {plugin.state.value}"
            for plugin in plugins
        ),
        hint=f"{' '.join(reasons)} What MAX has of its own under this name, if"
        f" anything, is served with {settings.DISABLE.name}={names}.",
    )
