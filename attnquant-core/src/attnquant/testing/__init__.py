"""For the tests of model packages: the conformance kit and what it is made of.

Nothing is imported before it is asked for, since pytest loads this package's plugin in
every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnquant.testing.conformance import ModelConformance
    from attnquant.testing.conformance.model import Setting

__all__ = ["ModelConformance", "Setting"]


def __getattr__(name: str) -> object:
    """Import the kit on first access (PEP 562)."""
    if name == "ModelConformance":
        from attnquant.testing.conformance import ModelConformance

        return ModelConformance
    if name == "Setting":
        from attnquant.testing.conformance.model import Setting

        return Setting
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
