"""Fixtures that several test files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def _offline() -> None:
    # Nothing here may ask a model hub, nor send usage data.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["MODULAR_TELEMETRY_ENABLED"] = "0"


@pytest.fixture(scope="session")
def real_checkpoint() -> Path:
    path = ROOT / "build" / "gemma3-270m"
    if not (path / "config.json").is_file():
        pytest.fail(f"{path} is missing: run `make model`")
    return path
