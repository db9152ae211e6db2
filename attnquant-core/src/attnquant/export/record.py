"""What an export says of itself, beside the files that other software reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attnquant
from attnquant.errors import CheckpointError
from attnquant.theta.bundle import Bundle
from attnquant.theta.checkpoint import BUNDLE_KEY, read_json

RECORD = "attnquant_export.json"
"""The file's name. Only a directory that has it is replaced by another export."""

_KEPT = ("format_version", "method", "source", "error", "created_by")


def record(bundle: Bundle, form: str) -> dict[str, Any]:
    """Return what was exported, in which form, and by what."""
    block = bundle.checkpoint.config[BUNDLE_KEY]
    return {
        "form": form,
        "bundle": bundle.checkpoint.path.resolve().name,
        "of": {field: block[field] for field in _KEPT if field in block},
        "exported_by": {"attnquant-core": attnquant.__version__},
    }


def is_export(directory: Path) -> bool:
    """Return whether a directory is an earlier export."""
    try:
        return "form" in read_json(directory / RECORD)
    except CheckpointError:
        return False
