"""MAX's compile cache, imitated: only what can be trusted stays in it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from attnquant import graph_cache
from attnquant.errors import ServingError
from attnquant.graph_cache import GraphCache, outcome, used_files

GRAPH = ".max_cache/mof/mef/26.7.0/graph"
OTHER = ".max_cache/mof/mef/26.7.0/other"
KERNEL = ".mojo_cache/mojo/transform/1.2.0ab-production/kernel"
CONTENT = b"\x00\x01create\x00Decoder_01$init\x00Decoder_01$exec\x00" + bytes(9000)


def sealed(content: bytes) -> bytes:
    """Return a file of MAX's: the content, and its hash, lowest byte first."""
    number = xxhash.xxh3_128_intdigest(content)
    return content + number.to_bytes(16, "little")


@pytest.fixture
def cache(tmp_path: Path) -> GraphCache:
    put(tmp_path, GRAPH, sealed(CONTENT))
    put(tmp_path, OTHER, sealed(b"Other_02$init\x00" + bytes(100)))
    put(tmp_path, KERNEL, sealed(b"code"))
    return GraphCache(tmp_path)


def put(folder: Path, path: str, content: bytes) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(content)


def paths(cache: GraphCache) -> set[str]:
    return {entry.path for entry in cache.entries()}


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda _: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "shorter than a hash": lambda content: content[:5],
    "zeroed": lambda content: bytes(len(content)),
    "one bit": lambda content: content[:50] + bytes([content[50] ^ 1]) + content[51:],
    "one bit of the hash": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "longer": lambda content: content + b"\x00",
}


@pytest.mark.parametrize("seen", [False, True], ids=["at first sight", "seen before"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_removed_and_the_rest_stays(
    cache: GraphCache, damage: str, *, seen: bool
) -> None:
    if seen:
        assert cache.check() == []
    file = cache.folder / GRAPH
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    (removed,) = cache.check()
    assert removed.path == GRAPH
    assert "damaged" in removed.reason
    assert paths(cache) == {OTHER, KERNEL}
    assert cache.check() == []


def test_a_damaged_kernel_is_removed_as_well(cache: GraphCache) -> None:
    (cache.folder / KERNEL).write_bytes(b"")
    assert [removed.path for removed in cache.check()] == [KERNEL]


@pytest.mark.parametrize("how", ["copied over it", "put in its place"])
def test_a_whole_file_in_the_place_of_another_is_removed(
    cache: GraphCache, how: str
) -> None:
    cache.check()
    graph, other = cache.folder / GRAPH, cache.folder / OTHER
    if how == "copied over it":
        graph.write_bytes(other.read_bytes())
    else:
        copy = other.with_name("copy")
        copy.write_bytes(other.read_bytes())
        copy.replace(graph)
    (removed,) = cache.check()
    assert removed.path == GRAPH
    assert "exchanged" in removed.reason


def test_what_is_compiled_anew_is_trusted_again(cache: GraphCache) -> None:
    cache.check()
    (cache.folder / GRAPH).write_bytes(b"")
    cache.check()
    put(cache.folder, GRAPH, sealed(CONTENT + b"compiled by another compiler"))
    assert cache.check() == []
    assert cache.check() == []
    assert GRAPH in paths(cache)


def test_files_that_nobody_touched_are_not_read_again(
    cache: GraphCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.check()

    def no_hash() -> None:
        raise AssertionError

    monkeypatch.setattr(graph_cache.xxhash, "xxh3_128", no_hash)
    assert cache.check() == []


def test_a_touched_file_of_the_same_content_stays(cache: GraphCache) -> None:
    cache.check()
    os.utime(cache.folder / GRAPH, (1, 1))
    assert cache.check() == []


def test_files_of_other_versions_are_left_alone(cache: GraphCache) -> None:
    foreign = ".max_cache/mof/mef/27.1.0/graph"
    put(cache.folder, foreign, b"sealed in some other way")
    assert cache.check(versions=["26.7.0", "1.2.0"]) == []
    assert foreign in paths(cache)
    (cache.folder / KERNEL).write_bytes(b"")
    removed = cache.check(versions=["26.7.0", "1.2.0"])
    assert [item.path for item in removed] == [KERNEL]


@pytest.mark.parametrize("name", ["graph.temp-stream-9a035f", "graph.lock-3d83c57f"])
def test_what_is_still_being_written_is_left_alone(
    cache: GraphCache, name: str
) -> None:
    file = (cache.folder / GRAPH).with_name(name)
    file.write_bytes(b"half of")
    assert cache.check() == []
    assert file.exists()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": {"stamp": [1]}}'])
def test_damaged_records_cost_a_reading_and_nothing_else(
    cache: GraphCache, text: str
) -> None:
    cache.check()
    records = cache.folder / graph_cache.OWN / graph_cache.RECORDS
    records.write_text(text)
    (cache.folder / OTHER).write_bytes(b"")
    assert [removed.path for removed in cache.check()] == [OTHER]
    assert paths(cache) == {GRAPH, KERNEL}


def test_starts_at_once_remove_a_file_once_and_lose_no_record(
    cache: GraphCache,
) -> None:
    (cache.folder / GRAPH).write_bytes(b"")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: cache.check(), range(8)))
    assert sorted(map(len, found)) == [0] * 7 + [1]
    assert paths(cache) == {OTHER, KERNEL}


def test_a_folder_that_is_not_there_is_an_empty_cache(tmp_path: Path) -> None:
    cache = GraphCache(tmp_path / "nothing")
    assert cache.check() == []
    assert cache.entries() == []


def test_a_damaged_file_that_cannot_be_removed_is_an_error_that_names_it(
    cache: GraphCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache.folder / GRAPH).write_bytes(b"")

    def refuse(_path: Path, *, missing_ok: bool) -> None:
        assert missing_ok
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ServingError, match=re.escape(GRAPH)) as refused:
        cache.check()
    assert "MODULAR_CACHE_DIR" in refused.value.hint
    assert refused.value.found == "Permission denied"


@given(
    sizes=st.lists(st.integers(0, 50), max_size=6),
    limit=st.integers(0, 400),
    kept=st.integers(0, 5),
)
def test_what_was_used_longest_ago_goes_first_until_the_rest_fits(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int, kept: int
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    names = [f".max_cache/mof/mef/26.7.0/{index}" for index in range(len(sizes))]
    for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
        put(folder, name, bytes(size))
        os.utime(folder / name, (index, index))
    keep = {f".max_cache/mof/mef/26.7.0/{kept}"}
    removed = [e.path for e in GraphCache(folder).shrink(limit, keep)]
    candidates = [name for name in names if name not in keep]
    assert removed == candidates[: len(removed)]
    left = [i for i, name in enumerate(names) if name not in removed]
    total = sum(sizes[i] for i in left)
    assert total <= limit or {names[i] for i in left} <= keep
    if removed:
        # One less would not have been enough.
        assert total + sizes[names.index(removed[-1])] > limit


def test_use_counts_and_not_only_age(cache: GraphCache) -> None:
    for age, path in enumerate((GRAPH, OTHER, KERNEL)):
        os.utime(cache.folder / path, (age, age))
    cache.check(used=[GRAPH])
    assert [entry.path for entry in cache.entries()] == [OTHER, KERNEL, GRAPH]


def test_a_graph_has_the_name_it_was_compiled_under(cache: GraphCache) -> None:
    assert cache.graph_name(GRAPH) == "Decoder_01"
    assert cache.graph_name(KERNEL) == ""
    assert cache.graph_name("nothing") == ""


def test_the_files_in_use_are_those_that_are_mapped(
    cache: GraphCache, tmp_path: Path
) -> None:
    maps = tmp_path / "maps"
    line = f"7f00-7f01 r--p 00000000 00:00 1    {cache.folder.resolve() / GRAPH}\n"
    maps.write_text(f"7f00-7f01 rw-p 00000000 00:00 0\n{line}{line}")
    assert used_files(cache.folder, maps) == {GRAPH}
    assert used_files(cache.folder, tmp_path / "none") is None


def test_a_graph_that_was_there_and_is_mapped_is_a_hit(cache: GraphCache) -> None:
    said = outcome(cache, "Decoder_01", {GRAPH, OTHER}, {GRAPH})
    assert said == f"hit, {cache.folder / GRAPH}"


def test_a_graph_that_was_not_there_is_a_miss(cache: GraphCache) -> None:
    # Once compiled, it may or may not be mapped.
    for used in (set(), {GRAPH}, None):
        said = outcome(cache, "Decoder_01", {OTHER}, used)
        assert said == f"miss: compiled, and kept as {cache.folder / GRAPH}"


def test_a_graph_that_could_not_be_kept_is_a_miss(cache: GraphCache) -> None:
    said = outcome(cache, "Decoder_03", {GRAPH, OTHER}, {OTHER})
    assert said == f"miss: compiled, and not kept in {cache.folder}"
    # One of that name is there, but it is not the one in use.
    assert "not kept" in outcome(cache, "Decoder_01", {GRAPH, OTHER}, {OTHER})


def test_where_the_system_does_not_tell_nothing_is_claimed(cache: GraphCache) -> None:
    assert "not known" in outcome(cache, "Decoder_01", {GRAPH, OTHER}, None)
