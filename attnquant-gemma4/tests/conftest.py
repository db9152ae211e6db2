"""Fixtures that several test files share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _offline() -> None:
    # Nothing here may ask a model hub, nor send usage data.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["MODULAR_TELEMETRY_ENABLED"] = "0"
