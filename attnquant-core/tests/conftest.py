"""Fixtures of the core tests."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from core_support.plugins import TINY_PLUGIN, install

# Before numpy is imported: these matrices are tiny, and on a busy machine the threads
# of BLAS do nothing but wait for one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# How long an example takes says nothing there either.
settings.register_profile(
    "core", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("core")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("ATTNQUANT_"):
            monkeypatch.delenv(name)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give a folder for fake plugins, the only one in which plugins are looked for."""
    from attnquant.plugins import installed_plugins

    folder = tmp_path / "site-packages"
    folder.mkdir()
    known = set(sys.modules)
    with monkeypatch.context() as patch:
        # Without the folder that real plugins are installed in.
        rest = [p for p in sys.path if not any(Path(p).glob("attnquant*.dist-info"))]
        patch.setattr(sys, "path", [str(folder), *rest])
        importlib.invalidate_caches()
        installed_plugins.cache_clear()
        yield folder
    installed_plugins.cache_clear()
    importlib.invalidate_caches()
    for name in set(sys.modules) - known:
        if name.startswith("fake_"):
            del sys.modules[name]


@pytest.fixture
def tiny_plugin(home: Path) -> Path:
    """Install the tiny models' plugin, and no other."""
    install(home, "tiny", TINY_PLUGIN)
    return home
