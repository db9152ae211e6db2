"""The registry step: our architectures in, MAX's entries of the same task out."""

from __future__ import annotations

import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import attnquant
from attnquant.errors import ArchitectureError, ServingError
from attnquant.plugins import PluginSet, State, find_plugins
from attnquant.registry import TESTED_MAX, collect_architectures, pop_lazy_entry
from core_support.plugins import TINY_PLUGIN, install, supplying

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
    expected = "AttnQuant plugin a (attnquant-a 1.0) is failed: ValueError: no luck."
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
