"""MAX's compile cache: what is in it, whether it can be trusted, and how large it gets.

MAX keeps every compiled graph as a file that is named by a digest of the graph, of the
target and of its own version, and seals it: the last 16 bytes are a hash of the rest.
It writes files whole, so that neither starts at once nor a killed one leave half of
one. Two things it does not do. Of a damaged file it finds the hash to be wrong and then
fails, at every start, instead of compiling anew; and a file that is whole it takes for
what its name says, also if it is another graph's. `GraphCache.check` sees to both
before MAX looks: what is damaged, and what is not what it was when it was first seen,
is removed.

Nothing here imports MAX, except `cache_folder` to ask it where its cache is.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from attnquant.errors import ServingError

GRAPHS = ".max_cache"
TREES = (GRAPHS, ".mogg_cache", ".mojo_cache")
"""MAX's folders: compiled graphs, and two of the kernels that they are made of."""

OWN = ".attnquant_cache"
RECORDS = "records.json"
SEAL = 16
"""Bytes of the hash at the end of a file."""

_HEAD = 4096
"""How much of a graph's file has its name in it."""

_NAME_RE = re.compile(rb"([\w.-]+)\$init\b")
_TEMPORARY_RE = re.compile(r"\.(temp-stream|lock)")
_CHUNK = 8 << 20


@dataclass(frozen=True)
class Entry:
    """A file of the cache.

    Attributes:
        path: Relative to the cache's folder.
        size: Its bytes.
        written: When it was written, in seconds since the epoch.
        used: When a start last used it, as far as is known.
    """

    path: str
    size: int
    written: float
    used: float

    @property
    def is_graph(self) -> bool:
        """Whether it is a compiled graph, rather than a kernel."""
        return self.path.startswith(f"{GRAPHS}/")


@dataclass(frozen=True)
class Removed:
    """A file that was not to be trusted.

    Attributes:
        path: Relative to the cache's folder.
        reason: What was wrong with it.
    """

    path: str
    reason: str


@dataclass(frozen=True)
class _Record:
    """What a file was when it was last seen.

    Attributes:
        stamp: Size, and times of the last change of its content and of its inode in
            nanoseconds: no write leaves them as they were.
        seal: Its last bytes, in hexadecimal.
        used: When a start last used it.
    """

    stamp: tuple[int, int, int]
    seal: str
    used: float = 0.0


class GraphCache:
    """The cache in a folder.

    Processes may share it: whoever checks or removes holds a lock meanwhile.
    """

    def __init__(self, folder: Path) -> None:
        """Look at a folder, which need not exist."""
        self.folder = folder

    def entries(self) -> list[Entry]:
        """Return all files of the cache, those used longest ago first."""
        records = self._read_records()
        found = []
        for path in self._files():
            with suppress(FileNotFoundError):
                status = (self.folder / path).stat()
                record = records.get(path)
                used = max(status.st_mtime, record.used if record else 0.0)
                found.append(Entry(path, status.st_size, status.st_mtime, used))
        return sorted(found, key=lambda entry: (entry.used, entry.path))

    def graph_name(self, path: str) -> str:
        """Return the name a graph was compiled under; empty if its file has none."""
        with suppress(FileNotFoundError), (self.folder / path).open("rb") as file:
            names = _NAME_RE.findall(file.read(_HEAD))
            return ", ".join(dict.fromkeys(name.decode() for name in names))
        return ""

    def check(
        self, used: Collection[str] = (), versions: Collection[str] = ("",)
    ) -> list[Removed]:
        """Remove every file that is damaged, or other than when first seen.

        A file is read only if it is new or was touched since.

        Args:
            used: Files that this process uses; that is recorded.
            versions: Of MAX and its compiler, how the folders begin whose files are
                looked at: another version may seal its files in another way.

        Raises:
            ServingError: If such a file cannot be removed; it names the file.
        """
        removed = []
        with self._locked() as recorded:
            known, records = self._read_records(), {}
            for path in self._files():
                if not _is_of(path, versions):
                    continue
                with suppress(FileNotFoundError):
                    record, reason = _examine(self.folder / path, known.get(path))
                    if reason:
                        self._unlink(path, reason)
                        removed.append(Removed(path, reason))
                    elif path in used:
                        records[path] = replace(record, used=time.time())
                    else:
                        records[path] = record
            if recorded and records != known:
                self._write_records(records)
        return removed

    def shrink(self, limit: int, keep: Collection[str] = ()) -> list[Entry]:
        """Remove what was used longest ago until the rest is within a limit.

        Args:
            limit: Bytes.
            keep: Files that stay in any case.

        Returns:
            What was removed.

        Raises:
            ServingError: If a file cannot be removed.
        """
        entries = self.entries()
        total = sum(entry.size for entry in entries)
        removed = []
        with self._locked():
            for entry in entries:
                if total <= limit:
                    break
                if entry.path not in keep:
                    self._unlink(entry.path, "the cache is above its limit")
                    removed.append(entry)
                    total -= entry.size
        return removed

    def _files(self) -> Iterator[str]:
        for tree in TREES:
            for path in sorted((self.folder / tree).rglob("*")):
                # What is still being written, or was when its process was killed.
                if not _TEMPORARY_RE.search(path.name) and path.is_file():
                    yield path.relative_to(self.folder).as_posix()

    def _unlink(self, path: str, reason: str) -> None:
        try:
            (self.folder / path).unlink(missing_ok=True)
        except OSError as error:
            raise ServingError(
                str(self.folder / path),
                expected=f"a file that can be removed, since {reason}",
                found=error.strerror or str(error),
                hint="Make its folder writable, or set MODULAR_CACHE_DIR to another.",
            ) from error

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Keep others out, and say whether anything can be written here at all."""
        own = self.folder / OWN
        try:
            own.mkdir(parents=True, exist_ok=True)
            lock = (own / "lock").open("a", encoding="utf-8")
        except OSError:
            # Nobody else can change anything here either.
            yield False
            return
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield True

    def _read_records(self) -> dict[str, _Record]:
        try:
            text = (self.folder / OWN / RECORDS).read_text(encoding="utf-8")
            return {path: _record(value) for path, value in json.loads(text).items()}
        # Without records, or with damaged ones, every file is read anew.
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            return {}

    def _write_records(self, records: Mapping[str, _Record]) -> None:
        target = self.folder / OWN / RECORDS
        text = json.dumps({path: asdict(record) for path, record in records.items()})
        # Without space for them, the next start reads every file again.
        with suppress(OSError):
            beside = target.with_suffix(".new")
            beside.write_text(text, encoding="utf-8")
            beside.replace(target)


def _is_of(path: str, versions: Collection[str]) -> bool:
    folders = path.split("/")[:-1]
    return any(folder.startswith(tuple(versions)) for folder in folders)


def _record(value: Mapping[str, Any]) -> _Record:
    size, content, inode = map(int, value["stamp"])
    return _Record((size, content, inode), str(value["seal"]), float(value["used"]))


def _examine(file: Path, known: _Record | None) -> tuple[_Record, str]:
    """Return what a file is now, and what is wrong with it."""
    status = file.stat()
    stamp = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if known is not None and known.stamp == stamp:
        return known, ""
    digest = xxhash.xxh3_128()
    tail = b""
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            tail += chunk
            digest.update(tail[:-SEAL])
            tail = tail[-SEAL:]
    record = _Record(stamp, tail.hex(), known.used if known else 0.0)
    # MAX writes the number with its lowest byte first.
    if digest.digest()[::-1] != tail:
        return record, "it is damaged: its hash is not that of its content"
    if known is not None and known.seal != record.seal:
        return record, "it was exchanged: its content is not what was compiled"
    return record, ""


def used_files(folder: Path, maps: Path = Path("/proc/self/maps")) -> set[str] | None:
    """Return the files of a cache that this process has mapped: the graphs it runs.

    Args:
        folder: The cache's.
        maps: Where Linux tells; None is returned where nothing does.
    """
    try:
        lines = maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    prefix = f"{folder.resolve()}{os.sep}"
    paths = (line[start:] for line in lines if (start := line.find(prefix)) >= 0)
    return {path.removeprefix(prefix) for path in paths}


def outcome(
    cache: GraphCache, name: str, before: Collection[str], used: Collection[str] | None
) -> str:
    """Say in words what became of a graph that was just loaded.

    Args:
        cache: Where MAX looked.
        name: The graph's.
        before: The cache's files before.
        used: Those that are mapped now; None if that is not known.
    """
    ours = {
        entry.path
        for entry in cache.entries()
        if entry.is_graph and name in cache.graph_name(entry.path).split(", ")
    }
    if kept := sorted(ours.difference(before)):
        return f"miss: compiled, and kept as {cache.folder / kept[0]}"
    if used is None:
        return "not known: this system does not tell which files are in use"
    if hit := sorted(ours.intersection(used)):
        return f"hit, {cache.folder / hit[0]}"
    return f"miss: compiled, and not kept in {cache.folder}"


def cache_folder() -> Path:
    """Return the folder of MAX's caches, as MAX itself finds it.

    Raises:
        ServingError: If MAX is not installed, or keeps no cache.
    """
    try:
        from max._core.engine import max_cache_dir
    except ImportError as error:
        raise ServingError(
            "the compile cache",
            expected="MAX, whose cache it is",
            found=str(error),
            hint='Install it: pip install "attnquant-core[serving]".',
        ) from error
    found = max_cache_dir()
    if found is None:
        raise ServingError(
            "the compile cache",
            expected="a folder that MAX can find",
            found="none",
            hint="Set MODULAR_CACHE_DIR, XDG_CACHE_HOME or HOME.",
        )
    return Path(found).parent
