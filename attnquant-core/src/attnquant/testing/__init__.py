"""For the tests of model packages: the conformance kit and what it is made of.

Nothing is imported before it is asked for, since pytest loads this package's plugin in
every run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnquant.testing.checkpoints import digest, read_checkpoint
    from attnquant.testing.conformance import ModelConformance
    from attnquant.testing.conformance.model import Setting
    from attnquant.testing.metrics import compare_logits
    from attnquant.testing.parity import make_bundle, serving

__all__ = [
    "ModelConformance",
    "Setting",
    "compare_logits",
    "digest",
    "make_bundle",
    "read_checkpoint",
    "serving",
]

_HOMES = {
    "ModelConformance": "conformance",
    "Setting": "conformance.model",
    "compare_logits": "metrics",
    "digest": "checkpoints",
    "make_bundle": "parity",
    "read_checkpoint": "checkpoints",
    "serving": "parity",
}


def __getattr__(name: str) -> object:
    """Import a public name on first access (PEP 562)."""
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    found: object = getattr(module, name)
    return found
