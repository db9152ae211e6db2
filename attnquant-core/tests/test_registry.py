"""The registry step: our architectures in, MAX's entries of the same task out."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import attnquant
from attnquant.errors import ArchitectureError, ServingError
from attnquant.plugins import PluginSet, State, find_plugins
from attnquant.registry import (
    PLUGIN_SET_VARIABLE,
    TESTED_MAX,
    check_worker,
    collect_architectures,
    pop_lazy_entry,
    unregister_architectures,
)
from core_support.plugins import TINY_PLUGIN, install, supplying
from core_support.processes import environment

Table = dict[str, list[tuple[str, str, str | None]]]

DECLARATION = """
from max.graph.weights import WeightsFormat
from max.pipelines.lib import SupportedArchitecture
from max.pipelines.modeling.types import PipelineTask

arch = SupportedArchitecture(
    name={name!r},
    example_repo_ids=[],
    default_encoding="float32",
    supported_encodings={{"float32"}},
    pipeline_model=object,
    task=PipelineTask.{task},
    tokenizer=object,
    default_weights_format=WeightsFormat.safetensors,
    context_type=object,
    config=object,
)
"""
GENERATION = ("fake_generation", "arch", None)
EMBEDDING = (".embedding", "arch", "fake_arches")


def declare(file: Path, name: str, task: str = "TEXT_GENERATION") -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(DECLARATION.format(name=name, task=task))


@pytest.fixture(scope="module", autouse=True)
def lookup() -> Any:
    """Give what holds MAX's lazy table; before `home` hides installed packages."""
    from max.pipelines.lib import PIPELINE_REGISTRY

    return PIPELINE_REGISTRY._arch_lookup


@pytest.fixture
def table(lookup: Any, monkeypatch: pytest.MonkeyPatch) -> Table:
    """Put a lazy table of our own in place of MAX's."""
    table: Table = {"Other": [("never_imported", "arch", None)]}
    monkeypatch.setattr(lookup, "_lazy_architectures", table)
    return table


@pytest.fixture
def supplied(home: Path, table: Table) -> Path:
    """Install a plugin for `TinyForCausalLM`, which MAX has for two tasks."""
    source = TINY_PLUGIN.replace("tiny_arch:", "fake_tiny_arch:")
    install(home, "tiny", source)
    declare(home / "fake_tiny_arch.py", "TinyForCausalLM")
    declare(home / "fake_generation.py", "TinyForCausalLM")
    (home / "fake_arches").mkdir()
    (home / "fake_arches" / "__init__.py").touch()
    embedding = home / "fake_arches" / "embedding.py"
    declare(embedding, "TinyForCausalLM", "EMBEDDINGS_GENERATION")
    table["TinyForCausalLM"] = [GENERATION, EMBEDDING]
    return home


def names(architectures: list[Any]) -> list[str]:
    return [architecture.name for architecture in architectures]


@pytest.mark.usefixtures("supplied")
def test_the_lazy_entry_of_the_same_task_goes_and_the_others_stay(table: Table) -> None:
    assert names(collect_architectures(find_plugins({}))) == ["TinyForCausalLM"]
    assert {"Other", "TinyForCausalLM"} == set(table)
    assert table["TinyForCausalLM"] == [EMBEDDING]


@pytest.mark.usefixtures("supplied")
def test_a_name_without_other_tasks_goes_altogether(table: Table) -> None:
    table["TinyForCausalLM"] = [GENERATION]
    collect_architectures(find_plugins({}))
    assert list(table) == ["Other"]


@pytest.mark.usefixtures("supplied")
def test_a_name_that_max_does_not_have_changes_nothing(table: Table) -> None:
    del table["TinyForCausalLM"]
    collect_architectures(find_plugins({}))
    assert list(table) == ["Other"]


@pytest.mark.usefixtures("supplied")
def test_collecting_twice_is_collecting_once(table: Table) -> None:
    first = collect_architectures(find_plugins({}))
    second = collect_architectures(find_plugins({}))
    assert first[0] is second[0]
    assert table["TinyForCausalLM"] == [EMBEDDING]


def test_maxs_own_table_is_of_the_kind_that_is_popped_from(
    lookup: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from max.pipelines.architectures.qwen3 import qwen3_arch

    copy = {name: list(e) for name, e in lookup._lazy_architectures.items()}
    before = copy["Qwen3ForCausalLM"]
    monkeypatch.setattr(lookup, "_lazy_architectures", copy)
    pop_lazy_entry(qwen3_arch)
    assert len(before) == 2
    expected = [entry for entry in before if "embedding" in entry[1]]
    assert expected == copy["Qwen3ForCausalLM"]


@pytest.mark.usefixtures("supplied")
@pytest.mark.parametrize("elsewhere", [None, [], ()])
def test_a_max_that_keeps_its_table_elsewhere_is_refused(
    lookup: Any, monkeypatch: pytest.MonkeyPatch, elsewhere: object
) -> None:
    monkeypatch.setattr(lookup, "_lazy_architectures", elsewhere)
    with pytest.raises(ServingError) as caught:
        collect_architectures(find_plugins({}))
    error = caught.value
    assert error.subject.endswith("PIPELINE_REGISTRY._lazy_architectures")
    assert TESTED_MAX in error.expected
    assert error.found == type(elsewhere).__name__
    assert TESTED_MAX in error.hint


def test_nothing_installed_is_explained(table: Table) -> None:
    with pytest.raises(ArchitectureError) as caught:
        collect_architectures(PluginSet(()))
    error = caught.value
    assert (error.expected, error.found) == ("at least one loaded plugin", "none")
    assert "No AttnQuant plugin is installed" in error.hint
    assert list(table) == ["Other"]


def test_nothing_loaded_is_explained_plugin_by_plugin(home: Path, table: Table) -> None:
    install(home, "a", "import no_such_package")
    install(home, "b", supplying("B"))
    with pytest.raises(ArchitectureError) as caught:
        collect_architectures(find_plugins({"ATTNQUANT_DISABLE": "b"}))
    assert "Plugin a (attnquant-a 1.0) is missing dependency" in caught.value.hint
    assert "Plugin b (attnquant-b 1.0) is disabled" in caught.value.hint
    assert list(table) == ["Other"]


def test_a_plugin_in_trouble_is_warned_of_and_stops_no_other(
    supplied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(supplied, "a", "raise ValueError('no luck')")
    install(supplied, "b", supplying("B"))
    plugins = find_plugins({"ATTNQUANT_DISABLE": "b"})
    with caplog.at_level(logging.WARNING, "attnquant"):
        assert names(collect_architectures(plugins)) == ["TinyForCausalLM"]
    expected = (
        "AttnQuant plugin a (attnquant-a 1.0) is failed: ValueError: no luck."
        " Upgrade or reinstall attnquant-a."
    )
    assert [expected] == caplog.messages


@pytest.mark.parametrize(
    ("source", "state", "reason"),
    [
        (None, State.MISSING_DEPENDENCY, "No module named 'fake_tiny_arch'"),
        ("import no_such_package", State.MISSING_DEPENDENCY, "no_such_package"),
        ("1 / 0", State.FAILED, "ZeroDivisionError"),
        ("", State.FAILED, "AttributeError"),
        ("arch = 3", State.FAILED, "expected the SupportedArchitecture of Tiny"),
        (DECLARATION.format(name="X", task="TEXT_GENERATION"), State.FAILED, "'X'"),
    ],
)
def test_an_architecture_that_cannot_be_imported_is_explained(
    supplied: Path, table: Table, source: str | None, state: State, reason: str
) -> None:
    file = supplied / "fake_tiny_arch.py"
    if source is None:
        file.unlink()
    else:
        file.write_text(source)
    plugins = find_plugins({})
    with pytest.raises(ArchitectureError) as caught:
        collect_architectures(plugins)
    assert state is plugins.plugins[0].state
    assert reason in caught.value.hint
    # What MAX has of its own stays when ours cannot take its place.
    assert table["TinyForCausalLM"] == [GENERATION, EMBEDDING]


@pytest.mark.usefixtures("tables")
def test_an_architecture_whose_plugin_is_in_trouble_is_refused_with_the_reason(
    supplied: Path, lookup: Any, table: Table
) -> None:
    install(supplied, "b", supplying("B"))
    (supplied / "nowhere.py").write_text("raise ValueError('no luck')")
    own = table["B"] = [("never_imported", "arch", None)]
    plugins = find_plugins({})
    assert names(collect_architectures(plugins)) == ["TinyForCausalLM"]
    with pytest.raises(ArchitectureError) as caught:
        lookup.find("B")
    error = caught.value
    assert error.subject == "B"
    assert error.found == "b (attnquant-b 1.0), which is failed"
    assert "ValueError: no luck" in error.hint
    assert "ATTNQUANT_DISABLE=b" in error.hint
    unregister_architectures()
    assert table["B"] == own


@pytest.mark.usefixtures("tables")
def test_two_claims_are_refused_until_one_is_pinned(
    supplied: Path, lookup: Any
) -> None:
    install(supplied, "b", supplying("B"))
    install(supplied, "c", supplying("B", "C"))
    declare(supplied / "nowhere.py", "B")
    collect_architectures(find_plugins({}))
    with pytest.raises(ArchitectureError, match="ATTNQUANT_PIN=B=") as caught:
        lookup.find("B")
    assert "ATTNQUANT_DISABLE=b,c" in caught.value.hint
    pinned = collect_architectures(find_plugins({"ATTNQUANT_PIN": "B=attnquant-b"}))
    assert names(pinned) == ["B", "TinyForCausalLM"]
    assert lookup.find("B") is None


@pytest.mark.usefixtures("tables")
def test_what_is_disabled_is_left_to_max(supplied: Path, table: Table) -> None:
    install(supplied, "b", supplying("B"))
    own = table["B"] = [("never_imported", "arch", None)]
    collect_architectures(find_plugins({"ATTNQUANT_DISABLE": "b"}))
    assert table["B"] == own


@pytest.fixture
def fresh() -> ModuleType:
    """Give the package as it is before anyone asked for its architectures."""
    vars(attnquant).pop("ARCHITECTURES", None)
    yield attnquant
    vars(attnquant).pop("ARCHITECTURES", None)


@pytest.mark.usefixtures("supplied")
def test_max_finds_the_architectures_as_a_list_collected_once(
    fresh: ModuleType,
) -> None:
    assert "ARCHITECTURES" not in vars(fresh)
    assert names(fresh.ARCHITECTURES) == ["TinyForCausalLM"]
    assert isinstance(fresh.ARCHITECTURES, list)
    assert fresh.ARCHITECTURES is fresh.ARCHITECTURES


def test_architectures_that_cannot_be_collected_are_asked_for_again(
    home: Path, table: Table, fresh: ModuleType
) -> None:
    assert not any(home.iterdir())
    for _ in range(2):
        with pytest.raises(ArchitectureError, match="No AttnQuant plugin is installed"):
            _ = fresh.ARCHITECTURES
    assert list(table) == ["Other"]


def test_other_attributes_are_not_there(fresh: ModuleType) -> None:
    with pytest.raises(AttributeError, match="'attnquant' has no attribute 'MODELS'"):
        _ = fresh.MODELS


# --- and back ----------------------------------------------------------------------


@pytest.fixture
def tables(lookup: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give MAX's lookup with its other tables empty."""
    monkeypatch.setattr("attnquant.registry._REPLACED", {})
    monkeypatch.setattr("attnquant.registry._REFUSED", {})
    for name in ("architectures", "_architectures_by_task"):
        monkeypatch.setattr(lookup, name, {})
    monkeypatch.setattr(lookup, "_imported_custom_arch_specs", set())
    return lookup


@pytest.mark.usefixtures("supplied", "fresh")
def test_unregistering_restores_what_max_has_of_its_own(
    tables: Any, table: Table
) -> None:
    before = {name: list(entries) for name, entries in table.items()}
    for architecture in collect_architectures(find_plugins({})):
        tables.register(architecture, allow_override=True)
    assert list(tables.architectures) == ["TinyForCausalLM"]
    unregister_architectures()
    assert tables.architectures == tables._architectures_by_task == {}
    assert {name: sorted(entries) for name, entries in table.items()} == {
        name: sorted(entries) for name, entries in before.items()
    }
    unregister_architectures()


@pytest.mark.usefixtures("supplied", "fresh")
def test_max_can_register_ours_and_its_own_in_turn(tables: Any) -> None:
    origin = []
    for _ in range(2):
        tables.import_custom_architectures(["attnquant"])
        origin.append(tables.find("TinyForCausalLM", task=generation()))
        unregister_architectures()
        origin.append(tables.find("TinyForCausalLM", task=generation()))
        tables.architectures.clear()
        tables._architectures_by_task.clear()
        tables._lazy_architectures["TinyForCausalLM"] = [GENERATION]
    ours, built_in = origin[:2]
    assert ours is not built_in
    assert origin == [ours, built_in, ours, built_in]


@pytest.mark.usefixtures("supplied", "fresh")
def test_a_built_in_that_was_loaded_already_comes_back(tables: Any) -> None:
    built_in = tables.find("TinyForCausalLM", task=generation())
    embedding = tables.find("TinyForCausalLM", task=embeddings())
    tables.import_custom_architectures(["attnquant"])
    assert tables.find("TinyForCausalLM", task=generation()) is not built_in
    assert tables.find("TinyForCausalLM", task=embeddings()) is embedding
    unregister_architectures()
    assert tables.find("TinyForCausalLM", task=generation()) is built_in
    assert tables.find("TinyForCausalLM", task=embeddings()) is embedding


@pytest.mark.usefixtures("supplied", "fresh")
def test_the_other_task_survives_unregistering(tables: Any) -> None:
    tables.import_custom_architectures(["attnquant"])
    embedding = tables.find("TinyForCausalLM", task=embeddings())
    assert embedding.task == embeddings()
    unregister_architectures()
    assert tables.find("TinyForCausalLM", task=embeddings()) is embedding
    assert tables.find("TinyForCausalLM", task=generation()).task == generation()


def generation() -> Any:
    from max.pipelines.modeling.types import PipelineTask

    return PipelineTask.TEXT_GENERATION


def embeddings() -> Any:
    from max.pipelines.modeling.types import PipelineTask

    return PipelineTask.EMBEDDINGS_GENERATION


# --- the worker ----------------------------------------------------------------------


IN_A_WORKER = """
import multiprocessing, os, sys
from attnquant.plugins import find_plugins
from attnquant.registry import check_worker

def worker():
    os.environ.update(disabled)
    check_worker(find_plugins(), os.environ)

disabled = {"ATTNQUANT_DISABLE": sys.argv[1]} if len(sys.argv) > 1 else {}

if __name__ == "__main__":
    check_worker(find_plugins({}), os.environ)
    process = multiprocessing.get_context("spawn").Process(target=worker)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


def worker(home: Path, tmp_path: Path, *arguments: str) -> Any:
    script = tmp_path / "server.py"
    script.write_text(IN_A_WORKER)
    return subprocess.run(
        [sys.executable, script, *arguments],
        env=environment(home),
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_worker_with_the_same_plugins_goes_on(home: Path, tmp_path: Path) -> None:
    install(home, "a", supplying("A"))
    done = worker(home, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_worker_with_other_plugins_fails_loudly(home: Path, tmp_path: Path) -> None:
    install(home, "a", supplying("A"))
    done = worker(home, tmp_path, "a")
    assert done.returncode == 1
    assert "PluginError: the plugins of the serving worker: expected" in done.stderr
    assert "a: attnquant-a 1.0, fake_a, A (nowhere:arch, API 1)" in done.stderr
    assert "Plugin a (attnquant-a 1.0) is disabled" in done.stderr


def test_a_process_of_its_own_does_not_compare(home: Path) -> None:
    install(home, "a", supplying("A"))
    told = {PLUGIN_SET_VARIABLE: "somebody else's"}
    check_worker(find_plugins({}), told)
    assert told[PLUGIN_SET_VARIABLE].startswith(find_plugins({}).digest)


@pytest.mark.parametrize("change", ["version", "distribution", "value", "source"])
def test_the_digest_tells_plugin_sets_apart(home: Path, change: str) -> None:
    install(home, "a", supplying("A"))
    before = find_plugins({}).digest
    assert find_plugins({}).digest == before
    shutil.rmtree(next(home.glob("*.dist-info")))
    (home / "fake_a_twin.py").write_text(supplying("A"))
    other = {"version": "2.0", "distribution": "maker", "value": "fake_a_twin"}
    source = supplying("A", "B") if change == "source" else supplying("A")
    known = {change: other[change]} if change in other else {}
    sys.modules.pop("fake_a", None)
    install(home, "a", source, **known)
    assert find_plugins({}).digest != before
