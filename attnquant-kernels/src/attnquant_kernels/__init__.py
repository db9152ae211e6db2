"""Mojo kernels for AttnQuant, where they lie, and a numpy oracle for each."""

from __future__ import annotations

__version__ = "0.1.0"
