"""Mojo kernels for AttnQuant, where they lie, and a numpy oracle for each.

`attnquant_kernels.graph` puts the ops into MAX graphs; only that module imports MAX.
"""

from __future__ import annotations

from pathlib import Path

from attnquant_kernels.oracle import generated_linear

__version__ = "0.1.0"

__all__ = ["__version__", "generated_linear", "mojo_package"]


def mojo_package() -> Path:
    """Return the folder of the Mojo package, for MAX's ``custom_extensions``."""
    return Path(__file__).parent / "mojo"
