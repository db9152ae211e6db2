"""AttnQuant: compressed decoders on Modular MAX.

Importing this package is cheap: neither MAX nor any plugin is imported. MAX reads
`attnquant.ARCHITECTURES` when it is started with `--custom-architectures attnquant`;
the architectures of all installed plugins are collected at that moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from max.pipelines.lib import SupportedArchitecture

    ARCHITECTURES: list[SupportedArchitecture]

__all__ = ["__version__"]


def __getattr__(name: str) -> object:
    """Collect `ARCHITECTURES` on first access (PEP 562)."""
    if name != "ARCHITECTURES":
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    from attnquant.registry import collect_architectures

    architectures = collect_architectures()
    globals()["ARCHITECTURES"] = architectures
    return architectures
