"""Discovery: each plugin in its state, and none able to stop another."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from attnquant.errors import ArchitectureError, PluginError, SettingError
from attnquant.hookspecs import PLUGIN_API_VERSION
from attnquant.plugins import Plugin, State, find_plugins, installed_plugins
from core_support.plugins import install, supplying


def states(environ: dict[str, str] | None = None) -> dict[str, State]:
    return {p.name: p.state for p in find_plugins(environ or {}).plugins}


def plugin(name: str, environ: dict[str, str] | None = None) -> Plugin:
    found = find_plugins(environ or {})
    return next(plugin for plugin in found.plugins if plugin.name == name)


def test_a_plugin_is_found_by_its_metadata(home: Path) -> None:
    install(home, "a", supplying("A"), distribution="maker-of-a", version="2.3")
    found = plugin("a")
    assert (found.distribution, found.version) == ("maker-of-a", "2.3")
    assert found.entry_point == "fake_a"
    assert (found.state, found.reason, found.exception) == (State.LOADED, "", None)
    assert [architecture.name for architecture in found.architectures] == ["A"]
    assert found.load_seconds > 0


def test_plugins_are_sorted_by_name(home: Path) -> None:
    for name in ("c", "a", "b"):
        install(home, name, supplying(name.upper()))
    assert [plugin.name for plugin in find_plugins({}).plugins] == ["a", "b", "c"]


def test_a_plugin_may_be_any_object(home: Path) -> None:
    source = (
        "from attnquant.hookspecs import Architecture, hookimpl\n"
        "class Implementation:\n"
        "    @hookimpl\n"
        "    def attnquant_architectures(self):\n"
        "        return [Architecture('A', 'nowhere:arch', 1)]\n"
        "plugin = Implementation()\n"
    )
    install(home, "a", source, value="fake_a:plugin")
    assert states() == {"a": State.LOADED}


def test_a_plugin_may_supply_several_architectures(home: Path) -> None:
    install(home, "a", supplying("A", "B"))
    assert sorted(find_plugins({}).supplied) == ["A", "B"]


def test_installed_plugins_are_found_once(home: Path) -> None:
    install(home, "a", supplying("A"))
    assert installed_plugins() is installed_plugins()


def test_no_plugin_at_all_is_no_error(home: Path) -> None:
    assert not any(home.iterdir())
    assert find_plugins({}).plugins == ()


@pytest.mark.parametrize(
    ("name", "names"),
    [("ATTNQUANT_DISABLE", "b"), ("ATTNQUANT_PLUGINS", "a")],
)
def test_a_disabled_plugin_is_not_even_imported(
    home: Path, name: str, names: str
) -> None:
    install(home, "a", supplying("A"))
    install(home, "b", "raise SystemExit")
    assert states({name: names}) == {"a": State.LOADED, "b": State.DISABLED}
    assert name in plugin("b", {name: names}).reason


def test_a_plugin_that_is_both_allowed_and_disabled_is_disabled(home: Path) -> None:
    install(home, "a", supplying("A"))
    environ = {"ATTNQUANT_PLUGINS": "a", "ATTNQUANT_DISABLE": "a"}
    assert states(environ) == {"a": State.DISABLED}


def test_the_process_environment_is_the_default(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(home, "a", supplying("A"))
    monkeypatch.setenv("ATTNQUANT_DISABLE", "a")
    assert find_plugins().plugins[0].state is State.DISABLED


def test_a_malformed_pin_is_an_error_of_the_users(home: Path) -> None:
    install(home, "a", supplying("A"))
    with pytest.raises(SettingError, match="ATTNQUANT_PIN"):
        find_plugins({"ATTNQUANT_PIN": "A"})


@pytest.mark.parametrize(
    ("version", "upgrade"), [(0, "attnquant-a"), (2, "attnquant-core")]
)
def test_another_api_version_is_incompatible(
    home: Path, version: int, upgrade: str
) -> None:
    install(home, "a", supplying("A", api_version=version))
    found = plugin("a")
    assert found.state is State.INCOMPATIBLE
    assert f"written for plugin API {version}" in found.reason
    assert f"attnquant-core has {PLUGIN_API_VERSION}" in found.reason
    assert found.reason.endswith(f"Upgrade {upgrade}.")


@pytest.mark.parametrize(
    "other_hook",
    [
        "def attnquant_hook_of_version_2(): ...",
        "def attnquant_prefix_map(argument_of_version_2): ...",
    ],
)
def test_hooks_of_a_newer_api_are_explained_by_its_version(
    home: Path, other_hook: str
) -> None:
    source = supplying("A", api_version=2) + f"\n@hookimpl\n{other_hook}\n"
    install(home, "a", source)
    found = plugin("a")
    assert found.state is State.INCOMPATIBLE
    assert found.reason.endswith("Upgrade attnquant-core.")


@pytest.mark.parametrize("version", ["1", None, 1.5, [1]])
def test_an_api_version_that_is_no_number_is_a_failure(
    home: Path, version: object
) -> None:
    install(home, "a", supplying("A", api_version=version))
    install(home, "b", supplying("B"))
    assert states() == {"a": State.FAILED, "b": State.LOADED}
    assert repr(version) in plugin("a").reason


def test_a_missing_dependency_is_named(home: Path) -> None:
    install(home, "a", "import no_such_package.part")
    found = plugin("a")
    assert found.state is State.MISSING_DEPENDENCY
    assert "No module named 'no_such_package'" in found.reason
    assert "Reinstall attnquant-a" in found.reason
    assert isinstance(found.exception, ModuleNotFoundError)


def test_a_missing_dependency_may_show_in_a_hook_only(home: Path) -> None:
    source = supplying("A").replace("return", "import no_such_package; return")
    install(home, "a", source)
    assert plugin("a").state is State.MISSING_DEPENDENCY


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ValueError('no luck')", "ValueError: no luck"),
        ("1 / 0", "ZeroDivisionError"),
        ("def", "SyntaxError"),
        ("from json import no_such_name", "ImportError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_whatever_an_import_raises_is_kept_and_shown(
    home: Path, source: str, reason: str
) -> None:
    install(home, "a", source)
    found = plugin("a")
    assert found.state is State.FAILED
    assert reason in found.reason
    assert found.exception is not None


def test_whatever_the_first_hook_raises_is_kept_and_shown(home: Path) -> None:
    install(
        home, "a", supplying("A").replace("return", "raise OSError('x')\n    return")
    )
    found = plugin("a")
    assert found.state is State.FAILED
    assert found.reason == "OSError: x. Upgrade or reinstall attnquant-a."


@pytest.mark.parametrize("value", ["fake_gone", "fake_gone.part:plugin"])
def test_an_entry_point_whose_module_is_gone_is_told_from_a_dependency(
    home: Path, value: str
) -> None:
    install(home, "a", None, value=value)
    found = plugin("a")
    assert found.state is State.FAILED
    assert f"entry point {value} names a module that does not exist" in found.reason
    assert "Reinstall attnquant-a" in found.reason


def test_an_entry_point_whose_attribute_is_gone_fails(home: Path) -> None:
    install(home, "a", supplying("A"), value="fake_a:gone")
    assert plugin("a").state is State.FAILED
    assert "gone" in plugin("a").reason


def test_a_misspelled_hook_is_named(home: Path) -> None:
    source = supplying("A") + "\n@hookimpl\ndef attnquant_prefixmap(): ...\n"
    install(home, "a", source)
    found = plugin("a")
    assert found.state is State.FAILED
    assert "attnquant_prefixmap" in found.reason


def test_a_hook_with_an_argument_too_many_is_named(home: Path) -> None:
    source = supplying("A") + "\n@hookimpl\ndef attnquant_prefix_map(konfig): ...\n"
    install(home, "a", source)
    found = plugin("a")
    assert found.state is State.FAILED
    assert "attnquant_prefix_map" in found.reason
    assert "konfig" in found.reason
    assert "\n" not in found.reason


def test_a_module_without_hooks_fails(home: Path) -> None:
    install(home, "a", "")
    found = plugin("a")
    assert found.state is State.FAILED
    assert "hook attnquant_architectures" in found.reason
    assert "found None" in found.reason


@pytest.mark.parametrize(
    "result", ["None", "[]", "()", "'A'", "['A']", "42", "{'A': 1}"]
)
def test_a_hook_that_returns_nonsense_fails(home: Path, result: str) -> None:
    source = supplying("A").replace("return [", f"return {result} or [")
    source = source.replace("or [Arch", "\n    [Arch")
    install(home, "a", source)
    found = plugin("a")
    assert found.state is State.FAILED
    assert "at least one attnquant.hookspecs.Architecture" in found.reason
    assert found.reason.endswith(f"found {eval(result)!r}")
    assert isinstance(found.exception, PluginError)


TROUBLE = {
    "import": "raise ValueError",
    "exit": "raise SystemExit",
    "dependency": "import no_such_package",
    "hook": supplying("X").replace("return", "raise ValueError\n    return"),
    "nonsense": supplying("X").replace("return [", "return 42, ["),
    "misspelled": supplying("X") + "\n@hookimpl\ndef attnquant_x(): ...\n",
    "signature": supplying("X") + "\n@hookimpl\ndef attnquant_kv_params(y): ...\n",
    "version": supplying("X", api_version=9),
}


@pytest.mark.parametrize("trouble", TROUBLE)
def test_one_plugins_failure_does_not_stop_another(home: Path, trouble: str) -> None:
    # One before and one after it in the order of loading.
    for name in ("a", "z"):
        install(home, name, supplying(name.upper()))
    install(home, "m", TROUBLE[trouble])
    found = states()
    assert (found["a"], found["z"]) == (State.LOADED, State.LOADED)
    assert found["m"] not in {State.LOADED, State.DISABLED}


@pytest.mark.parametrize("content", ["", "Name: attnquant-a\n", None])
def test_incomplete_metadata_do_not_stop_discovery(
    home: Path, content: str | None
) -> None:
    install(home, "a", supplying("A"))
    install(home, "b", supplying("B"))
    metadata = next(home.glob("attnquant_a*")) / "METADATA"
    if content is None:
        metadata.unlink()
    else:
        metadata.write_text(content)
    assert states() == {"a": State.LOADED, "b": State.LOADED}
    assert plugin("a").version == "unknown"


def test_a_distribution_that_is_uninstalled_is_gone(home: Path) -> None:
    install(home, "a", supplying("A"))
    install(home, "b", supplying("B"))
    assert sorted(states()) == ["a", "b"]
    shutil.rmtree(next(home.glob("attnquant_b*")))
    assert sorted(states()) == ["a"]


# --- hooks that nobody would call --------------------------------------------------


@pytest.mark.parametrize(
    ("source", "told"),
    [
        # Marked and misspelled; misspelled and not marked; spelled well, not marked.
        (
            "@hookimpl\ndef attnquant_prefixmap(): ...",
            "did you mean attnquant_prefix_map",
        ),
        ("def attnquant_prefix_maps(): ...", "did you mean attnquant_prefix_map"),
        ("def Attnquant_W0_Group(): ...", "did you mean attnquant_w0_group"),
        ("def attnquant_kv_params(): ...", "marked with @hookimpl"),
        (
            "@hookimpl\ndef attnquant_w0_group(*, config): ...",
            "config, which would not be passed",
        ),
        ("@hookimpl\ndef attnquant_w0_group(**kwargs): ...", "**kwargs"),
        ("@hookimpl\ndef attnquant_w0_group(config=None): ...", "without a default"),
    ],
)
def test_a_hook_that_would_never_be_called_as_meant_is_named(
    home: Path, source: str, told: str
) -> None:
    install(home, "a", f"{supplying('A')}\n{source}\n")
    found = plugin("a")
    assert found.state is State.FAILED
    assert told in found.reason
    assert "plugin a, hook attnquant" in found.reason.lower()


def test_an_object_is_looked_at_as_a_module_is(home: Path) -> None:
    source = (
        "from attnquant.hookspecs import Architecture, hookimpl\n"
        "class Implementation:\n"
        "    @hookimpl\n"
        "    def attnquant_architectures(self):\n"
        "        return [Architecture('A', 'nowhere:arch', 1)]\n"
        "    @staticmethod\n"
        "    def attnquant_prefix_map(): ...\n"
        "plugin = Implementation()\n"
    )
    install(home, "a", source, value="fake_a:plugin")
    assert "hook attnquant_prefix_map" in plugin("a").reason


@pytest.mark.parametrize(
    "helper", ["def prefix_map(): ...", "def attnquant_helper(): ...", "x = property()"]
)
def test_helpers_of_other_names_are_no_hooks(home: Path, helper: str) -> None:
    install(home, "a", f"{supplying('A')}\n{helper}\n")
    assert plugin("a").state is State.LOADED


def test_an_interrupt_is_not_swallowed(home: Path) -> None:
    install(home, "a", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        find_plugins({})


def test_an_exception_of_any_kind_is_kept(home: Path) -> None:
    install(home, "a", "raise type('Odd', (BaseException,), {})('x')")
    assert plugin("a").reason.startswith("Odd: x.")


# --- versions of MAX -----------------------------------------------------------------


@pytest.fixture
def max_26_7(home: Path) -> None:
    """Install metadata of MAX 26.7.0, in front of the real one."""
    info = home / "max-26.7.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: max\nVersion: 26.7.0\n"
    )


@pytest.mark.usefixtures("max_26_7")
@pytest.mark.parametrize(
    ("tested", "state"),
    [
        (">=26.7,<26.8", State.LOADED),
        ("", State.LOADED),
        (">=26.8", State.INCOMPATIBLE),
        ("<26.7", State.INCOMPATIBLE),
        ("26.7 or so", State.FAILED),
    ],
)
def test_a_max_outside_the_tested_range_is_incompatible(
    home: Path, tested: str, state: State
) -> None:
    source = supplying("A").replace(", 1)", f", 1, {tested!r})")
    install(home, "a", source)
    found = plugin("a")
    assert found.state is state
    if state is State.INCOMPATIBLE:
        assert found.reason == (
            f"tested with MAX {tested}, and 26.7.0 is installed. Upgrade attnquant-a,"
            f' or install "max[serve]{tested}".'
        )
    if state is State.FAILED:
        assert "tested_max" in found.reason


def test_without_max_its_version_does_not_matter(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnquant.loading.max_version", lambda: None)
    install(home, "a", supplying("A").replace(", 1)", ", 1, '>=99')"))
    assert plugin("a").state is State.LOADED


# --- names that nothing declares ----------------------------------------------------


def test_an_allowed_plugin_that_is_not_installed_is_reported(home: Path) -> None:
    install(home, "gamma", supplying("A"))
    environ = {"ATTNQUANT_PLUGINS": "gamma,gama"}
    assert states(environ)["gamma"] is State.LOADED
    found = plugin("gama", environ)
    assert found.state is State.FAILED
    assert "named in ATTNQUANT_PLUGINS" in found.reason
    assert "Did you mean gamma?" in found.reason
    with pytest.raises(
        ArchitectureError, match="Plugin gama \\(not installed\\) is failed"
    ):
        find_plugins(environ).find("B")


@pytest.mark.parametrize(
    "architecture",
    ["'', 'm:a', 1", "'A', 'm', 1", "'A', ':a', 1", "'A', 'm:', 1", "'A', 'm:a', True"],
)
def test_an_architecture_that_could_not_be_found_fails(
    home: Path, architecture: str
) -> None:
    source = supplying("A").replace("'A', 'nowhere:arch', 1", architecture)
    assert architecture in source
    install(home, "a", source)
    found = plugin("a")
    assert found.state is State.FAILED
    assert "a target module:attribute" in found.reason


def test_an_architecture_named_twice_fails(home: Path) -> None:
    install(home, "a", supplying("A", "A"))
    found = plugin("a")
    assert found.state is State.FAILED
    assert "expected each architecture once, found A, A" in found.reason
