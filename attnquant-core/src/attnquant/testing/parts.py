"""The parts of the conformance kit."""

from __future__ import annotations

from collections.abc import Mapping

PARTS: Mapping[str, str] = {
    "structural": "without MAX, in seconds",
    "hooks": "with MAX, compiling nothing",
    "serving": "compiled models against the reference, minutes a formulation",
}
"""Each part, and what it takes."""
