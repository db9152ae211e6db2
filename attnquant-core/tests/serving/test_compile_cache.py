"""The compile cache around a start: what is removed is told, and the limit is kept."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from attnquant.errors import SettingError
from attnquant.loading import max_version
from attnquant.serving import compile_cache
from attnquant.serving.compile_cache import CheckedCache

GRAPHS = f".max_cache/mof/mef/{max_version()}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(compile_cache, "cache_folder", lambda: tmp_path)
    for name in ("ours", "other"):
        write(tmp_path / GRAPHS / name, f"{name}$init\0".encode() + bytes(1000))
    return tmp_path


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    # MAX's configuration may have switched propagation off.
    logger = logging.getLogger("max.pipelines.attnquant")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger.name)
    yield caplog
    logger.removeHandler(caplog.handler)


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    seal = xxhash.xxh3_128_intdigest(content).to_bytes(16, "little")
    path.write_bytes(content + seal)


def use(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    used = {f"{GRAPHS}/{name}" for name in names}
    monkeypatch.setattr(compile_cache, "used_files", lambda _folder: used)


def test_a_removed_file_is_told_of_with_the_reason(
    folder: Path, log: pytest.LogCaptureFixture
) -> None:
    damaged = folder / GRAPHS / "ours"
    damaged.write_bytes(b"")
    CheckedCache()
    assert not damaged.exists()
    warnings = [r.getMessage() for r in log.records if r.levelname == "WARNING"]
    (told,) = dict.fromkeys(warnings)
    assert str(damaged) in told
    assert "damaged" in told


def test_hit_and_miss_are_told(
    folder: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, "ours")
    CheckedCache().loaded("ours")
    assert f"compile cache: hit, {folder / GRAPHS / 'ours'}" in log.text
    cache = CheckedCache()
    write(folder / GRAPHS / "new", b"fresh$init\0")
    cache.loaded("fresh")
    assert f"compile cache: miss: compiled, and kept as {folder}" in log.text


@pytest.mark.usefixtures("log")
def test_the_limit_is_kept_and_what_is_in_use_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNQUANT_CACHE_LIMIT", "1kB")
    use(monkeypatch, "ours")
    CheckedCache().loaded("ours")
    assert [path.name for path in (folder / GRAPHS).iterdir()] == ["ours"]


def test_without_a_limit_nothing_is_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATTNQUANT_CACHE_LIMIT", raising=False)
    use(monkeypatch, "ours")
    CheckedCache().loaded("ours")
    assert len(list((folder / GRAPHS).iterdir())) == 2


@pytest.mark.parametrize("limit", ["", "much", "-1GB"])
@pytest.mark.usefixtures("folder")
def test_a_limit_that_is_no_size_is_refused(
    monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setenv("ATTNQUANT_CACHE_LIMIT", limit)
    with pytest.raises(SettingError, match="ATTNQUANT_CACHE_LIMIT"):
        CheckedCache()
