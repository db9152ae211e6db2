"""The documentation says what the code does: where that can be checked, it is here."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from functools import cache
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import markdown
import pytest
import yaml

from attnquant import hookspecs, plugins, settings
from attnquant.cli import decompose
from attnquant.cli import inspect as inspect_command
from attnquant.cli import plugins as list_plugins
from attnquant.cli.main import build_parser
from attnquant.errors import AttnQuantError, SettingError
from attnquant.needs import serving_needs
from attnquant.registry import collect_architectures
from attnquant.theta import FAMILIES, make_layout
from attnquant.theta.bands import check_shared_blocks
from attnquant.theta.bundle import BundleInfo, Source, open_bundle, parse_block
from attnquant.theta.names import ProjectionKey
from attnquant.theta.writer import Written

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
DOCS = ROOT / "docs"
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PACKAGES = sorted(path.parent for path in ROOT.glob("attnquant-*/pyproject.toml"))
READMES = [package / "README.md" for package in PACKAGES]
PAGES = [*TOP, *sorted(DOCS.glob("*.md")), *READMES]

FENCE_RE = re.compile(
    r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
FLAG_RE = re.compile(r"--[a-z][a-z-]*")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


# --------------------------------------------------------------------- reading pages


@cache
def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced code blocks of a language."""
    found = FENCE_RE.finditer(text(page))
    return [match["body"] for match in found if match["language"] == language]


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return FENCE_RE.sub("", text(page))


def spans(page: Path) -> list[str]:
    """Return the code spans of a page's prose, each on one line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def section(page: Path, title: str) -> str:
    """Return what stands below a heading, up to the next of its level or above."""
    match = re.search(rf"^(#+) {re.escape(title)}\n", prose(page), re.MULTILINE)
    assert match, f"{name_of(page)} has no section {title!r}"
    rest = prose(page)[match.end() :]
    return re.split(rf"^#{{1,{len(match[1])}}} ", rest, maxsplit=1, flags=re.MULTILINE)[
        0
    ]


def table(page: Path, title: str) -> list[list[str]]:
    """Return the rows of the first table in a section, without its header."""
    lines = section(page, title).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def first_column(page: Path, title: str) -> list[str]:
    """Return the code in the first column of a section's first table."""
    return [row[0].strip("`") for row in table(page, title)]


def commands(page: Path) -> Iterator[list[str]]:
    """Yield each command of the shell blocks, in words."""
    for block in blocks(page, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                # Where the output goes is the shell's business.
                yield words[: words.index(">")] if ">" in words else words


# ------------------------------------------------------------------- running commands


def run(
    *command: str | Path, cwd: Path, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command with no ATTNQUANT_ variables but these."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("ATTNQUANT_")}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=clean | dict(environ or {}),
        capture_output=True,
        text=True,
        check=False,
    )


def run_python_of(page: Path, cwd: Path) -> None:
    """Run all Python blocks of a page as one script."""
    found = blocks(page, "python")
    assert found, f"{name_of(page)} has no Python"
    script = cwd / "page.py"
    script.write_text("\n".join(found), encoding="utf-8")
    done = run(sys.executable, "-W", "error", script, cwd=cwd)
    assert done.returncode == 0, f"{name_of(page)}: {done.stderr}"


def parse(words: list[str]) -> None:
    """Parse an `attnquant` command line."""
    complaint = StringIO()
    try:
        with redirect_stderr(complaint):
            build_parser().parse_args(words)
    except SystemExit:
        pytest.fail(f"attnquant {shlex.join(words)}: {complaint.getvalue()}")


@cache
def parser_options() -> dict[str, set[str]]:
    """Return the long options of each `attnquant` command."""
    commands = next(
        action.choices
        for action in build_parser()._actions
        if isinstance(action.choices, dict)
    )
    return {
        name: {option for option in command._option_string_actions if "--" in option}
        for name, command in commands.items()
    }


# ---------------------------------------------------------------------- configuration


def test_the_table_of_variables_is_that_of_the_settings() -> None:
    expected = [
        [f"`{variable.name}`", variable.default, variable.range, variable.effect]
        for variable in settings.VARIABLES
    ]
    assert table(DOCS / "configuration.md", "The variables") == expected


@each_page
def test_only_variables_that_exist_are_named(page: Path) -> None:
    named = set(re.findall(r"\bATTNQUANT_[A-Z0-9_]*[A-Z0-9]", text(page)))
    assert named <= {variable.name for variable in settings.VARIABLES}


def test_every_variable_stands_in_the_table_of_who_reads_it() -> None:
    rows = first_column(DOCS / "configuration.md", "Which command reads which")
    named = re.findall(r"ATTNQUANT_\w+", " ".join(rows))
    assert sorted(named) == sorted(v.name for v in settings.VARIABLES)


# --------------------------------------------------------------------------- bundles


def example_block() -> dict[str, Any]:
    (example,) = blocks(DOCS / "theta-bundle.md", "json")
    block: dict[str, Any] = json.loads(example)
    return block


def bundle_info(num_layers: int, shared_blocks: int) -> BundleInfo:
    shapes = {
        ProjectionKey(layer, family): (8, 8)
        for layer in range(num_layers)
        for family in FAMILIES
    }
    layout = make_layout(
        shapes, num_layers=num_layers, shared_blocks=shared_blocks, lora_rank=4
    )
    error = dict.fromkeys(FAMILIES, 0.5)
    return BundleInfo("m", layout, "float32", {}, Source("s", {}), error, {})


def test_every_field_of_the_block_is_documented_and_no_other() -> None:
    rows = first_column(DOCS / "theta-bundle.md", "The attnquant block")
    assert rows == list(bundle_info(3, 2).to_json())


def test_the_example_of_a_block_is_one() -> None:
    block = example_block()
    written_again = parse_block(block).to_json()
    assert written_again == block
    assert list(written_again) == list(block)


# ------------------------------------------------------------------------ architecture


def arch_fields() -> list[str]:
    """Return the fields that attnquant-gemma3's declaration sets, in order."""
    source = ROOT / "attnquant-gemma3/src/attnquant_gemma3/arch.py"
    calls = [
        node
        for node in ast.walk(ast.parse(text(source)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "SupportedArchitecture"
    ]
    (call,) = calls
    return [str(keyword.arg) for keyword in call.keywords]


def test_every_field_of_the_declaration_is_documented_and_no_other() -> None:
    assert first_column(DOCS / "architecture.md", "The declaration") == arch_fields()


def cpu_window() -> int:
    source = ROOT / "attnquant-core/src/attnquant/serving/device.py"
    match = re.search(r"^MIN_CPU_WINDOW = (\d+)$", text(source), re.MULTILINE)
    assert match
    return int(match[1])


@pytest.mark.parametrize(
    "page",
    [
        DOCS / "architecture.md",
        DOCS / "serving.md",
        ROOT / "attnquant-gemma3" / "README.md",
    ],
    ids=name_of,
)
def test_the_narrowest_window_is_that_of_the_code(page: Path) -> None:
    pattern = r"sliding[ _]window:?\s(?:expected at least|below) (\d+)"
    found = re.findall(pattern, text(page))
    assert found
    assert {int(number) for number in found} == {cpu_window()}


# ----------------------------------------------------------------------------- plugins


def test_every_hook_has_a_heading_with_its_arguments_and_no_other() -> None:
    expected = [
        f"{name}({', '.join(inspect.signature(hook).parameters)})"
        for name, hook in vars(hookspecs).items()
        if name.startswith("attnquant_")
    ]
    page = DOCS / "plugins.md"
    headings = re.findall(
        r"^### `(.*)`$", section(page, "The five hooks"), re.MULTILINE
    )
    assert headings == expected


def test_the_states_are_those_of_the_code() -> None:
    rows = first_column(DOCS / "plugins.md", "States")
    assert rows == [state.value for state in plugins.State]


def test_the_json_of_the_plugins_command_is_as_shown() -> None:
    (example,) = blocks(DOCS / "plugins.md", "json")
    plugin = plugins.Plugin("n", "d", "1", "m")
    assert list(json.loads(example)[0]) == list(list_plugins.summary(plugin))


def test_choosing_plugins_names_every_variable_that_does() -> None:
    chosen = [settings.PLUGINS, settings.DISABLE, settings.PIN]
    rows = table(DOCS / "plugins.md", "Choosing plugins")
    assert [row[0].strip("`") for row in rows] == [v.name for v in chosen]
    for variable, row in zip(chosen, rows, strict=True):
        assert variable.read({variable.name: row[1].strip("`")})


@pytest.fixture
def tiny_plugin(tmp_path: Path) -> dict[str, str]:
    """Install the plugin of the page, and return an environment that finds it."""
    page = DOCS / "plugins.md"
    (metadata,) = blocks(page, "toml")
    project = tomllib.loads(metadata)["project"]
    package = tmp_path / "site" / project["name"].replace("-", "_")
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text("\n".join(blocks(page, "python")))
    installed = package.with_name(f"{package.name}-{project['version']}.dist-info")
    installed.mkdir()
    (installed / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\n"
        f"Version: {project['version']}\n"
    )
    (group,) = project["entry-points"]
    points = project["entry-points"][group].items()
    lines = [f"[{group}]", *(f"{name} = {target}" for name, target in points)]
    (installed / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return {"PYTHONPATH": str(package.parent)}


def test_the_minimal_plugin_is_loaded_and_decomposes(
    tiny_plugin: dict[str, str], tmp_path: Path
) -> None:
    done = run(
        *(BIN / "attnquant", "plugins", "--json"), cwd=tmp_path, environ=tiny_plugin
    )
    assert done.returncode == 0, done.stdout
    states = {item["name"]: item["state"] for item in json.loads(done.stdout)}
    assert states["tiny"] == "loaded"

    run_python_of(DOCS / "decompose.md", tmp_path)  # leaves a tiny checkpoint
    done = run(
        *(BIN / "attnquant", "decompose", "checkpoint", "--out", "of-the-plugin"),
        *("--blocks", "2", "--rank", "4", "--json"),
        cwd=tmp_path,
        environ=tiny_plugin,
    )
    assert done.returncode == 0, done.stderr
    # Its own prefix map and grouping key give what the page's API calls gave.
    written = [open_bundle(tmp_path / out) for out in ("bundle", "of-the-plugin")]
    assert written[0].info == written[1].info


# ------------------------------------------------------------------------ command line


def test_the_page_of_the_command_line_is_up_to_date() -> None:
    done = run(sys.executable, DOCS / "generate_cli.py", "--check", cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_the_command_line_page_does_not_depend_on_the_terminal() -> None:
    narrow = {"COLUMNS": "40", "FORCE_COLOR": "1"}
    script = DOCS / "generate_cli.py"
    done = run(sys.executable, script, "--check", cwd=ROOT, environ=narrow)
    assert done.returncode == 0, done.stderr


@each_page
def test_commands_that_are_shown_parse(page: Path) -> None:
    for words in commands(page):
        if words[0] == "attnquant":
            parse(words[1:])


@each_page
def test_commands_that_are_mentioned_exist(page: Path) -> None:
    options = parser_options()
    for span in spans(page):
        if not span.startswith("attnquant "):
            continue
        command = span.split()[1]
        assert command in options, span
        assert set(FLAG_RE.findall(span)) <= options[command], span


def test_the_options_of_decompose_are_all_explained() -> None:
    rows = first_column(DOCS / "decompose.md", "On the command line")
    assert sorted(rows) == sorted(parser_options()["decompose"] - {"--help"})


def test_the_json_of_decompose_and_inspect_is_as_shown(tmp_path: Path) -> None:
    run_python_of(DOCS / "decompose.md", tmp_path)
    bundle = open_bundle(tmp_path / "bundle")
    written = Written(
        tmp_path / "bundle", bundle.info, source_bytes=2, bundle_bytes=1, seconds=1.0
    )
    page = DOCS / "decompose.md"
    (example,) = map(json.loads, blocks(page, "json"))
    summary = decompose.summary(written)
    assert list(example) == list(summary)
    assert example["error"].keys() == summary["error"].keys()  # type: ignore[attr-defined]
    assert example["ratio"] == pytest.approx(
        example["source_bytes"] / example["bundle_bytes"], abs=0.005
    )

    needs = serving_needs(bundle, plugins.installed_plugins())
    shown = inspect_command.summary(bundle, needs)
    beside = shown.keys() - bundle.info.to_json().keys()
    paragraph = section(page, "What it prints").partition("Its JSON is")[2]
    assert beside <= set(re.findall(r"`(\w+)`", paragraph))


# One process for all, since most of its time is importing MAX.
HELP_OF_MAX = """
import contextlib, sys
from max._entrypoints.pipelines import main

for name in sys.argv[1:]:
    print("== " + name)
    with contextlib.suppress(SystemExit):
        main([name, "--help"])
"""


@pytest.fixture(scope="module")
def max_flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return the flags of MAX's commands."""
    offline = {"HF_HUB_OFFLINE": "1", "MODULAR_TELEMETRY_ENABLED": "0"}
    done = run(
        *(sys.executable, "-c", HELP_OF_MAX, "generate", "serve", "warm-cache"),
        cwd=tmp_path_factory.mktemp("max"),
        environ=offline,
    )
    assert done.returncode == 0, done.stderr
    sections = [part.partition("\n") for part in done.stdout.split("== ")[1:]]
    found = {name: set(FLAG_RE.findall(shown)) for name, _, shown in sections}
    return found | {"benchmark": flags_of_benchmark()}


def flags_of_benchmark() -> set[str]:
    """Return the flags of `max benchmark`: its options' fields, as its source has them.

    The command runs only with an extra of MAX's that is large and that no test needs.
    """
    spec = find_spec("max.benchmark")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or ()
    fields = re.compile(r"^    (\w+): ", re.MULTILINE)
    return {
        "--" + name.replace("_", "-")
        for path in Path(folder).rglob("*.py")
        for name in fields.findall(path.read_text(encoding="utf-8"))
    }


def test_flags_of_max_exist(max_flags: dict[str, set[str]]) -> None:
    shown = [words for page in PAGES for words in commands(page) if words[0] == "max"]
    assert shown
    for _, command, *words in shown:
        flags = {word for word in words if word.startswith("--")}
        assert flags <= max_flags[command], command
    listed = FLAG_RE.findall(" ".join(first_column(DOCS / "serving.md", "Flags")))
    assert set(listed) <= max_flags["serve"] | max_flags["generate"]


# ---------------------------------------------------------------------------- examples


@pytest.mark.parametrize(
    "page",
    [
        DOCS / "reconstruction.md",
        DOCS / "decompose.md",
        DOCS / "plugins.md",
        DOCS / "public-api.md",
        DOCS / "attnquant-linear.md",
        ROOT / "attnquant-kernels" / "README.md",
    ],
    ids=name_of,
)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    run_python_of(page, tmp_path)


def test_no_page_has_examples_that_are_not_run() -> None:
    (mark,) = test_examples_run.pytestmark  # type: ignore[attr-defined]
    # That of a client needs a server: test_serving_page.py.
    run_here_or_there = {*mark.args[1], DOCS / "serving.md"}
    assert {page for page in PAGES if blocks(page, "python")} == run_here_or_there


# ------------------------------------------------------------------------ error texts


def disabled() -> plugins.PluginSet:
    plugin = plugins.Plugin("gemma3", "attnquant-gemma3", "0.1.0", "m")
    plugin.set_state(plugins.State.DISABLED, f"named in {settings.DISABLE.name}.")
    return plugins.PluginSet((plugin,))


def blocks_of_zero() -> None:
    try:
        check_shared_blocks(0, 18)
    except SettingError as error:
        raise error.renamed(decompose._OPTIONS) from None


QUOTED: dict[str, tuple[str, Callable[[], object]]] = {
    "a formulation that is not there": (
        "configuration.md",
        lambda: settings.FORMULATION.read({"ATTNQUANT_FORMULATION": "fuse"}),
    ),
    "a contradiction, under configuration": (
        "configuration.md",
        lambda: settings.resolve_settings(
            18, bundle_info(18, 9), {"ATTNQUANT_BLOCKS": "3"}
        ),
    ),
    "a contradiction, under serving": (
        "serving.md",
        lambda: settings.resolve_settings(
            18, bundle_info(18, 9), {"ATTNQUANT_BLOCKS": "3"}
        ),
    ),
    "no rank": (
        "configuration.md",
        lambda: settings.resolve_settings(18, None, {"ATTNQUANT_BLOCKS": "3"}),
    ),
    "no plugin": (
        "serving.md",
        lambda: collect_architectures(plugins.PluginSet(())),
    ),
    "a disabled plugin": (
        "plugins.md",
        lambda: disabled().find("Gemma3ForCausalLM"),
    ),
    "no blocks": ("decompose.md", blocks_of_zero),
}


@pytest.mark.parametrize("case", QUOTED)
def test_errors_are_quoted_as_they_are(case: str) -> None:
    page, provoke = QUOTED[case]
    with pytest.raises(AttnQuantError) as caught:
        provoke()
    shown = "".join(blocks(DOCS / page, "text")).splitlines()
    messages = [line.removeprefix("attnquant: error: ") for line in shown]
    assert str(caught.value) in messages


def test_every_exception_is_introduced() -> None:
    from attnquant import errors

    names = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, AttnQuantError)
    ]
    paragraph = section(DOCS / "decompose.md", "Exceptions")
    assert [name for name in names if f"{name}`" not in paragraph] == []


# --------------------------------------------------------------------- links and lists


@cache
def anchors(page: Path) -> set[str]:
    html = markdown.markdown(text(page), extensions=["toc", "tables", "fenced_code"])
    return set(re.findall(r'<h\d id="([^"]+)"', html))


@each_page
def test_links_resolve(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", READMES, ids=name_of)
def test_readmes_of_packages_stand_alone(page: Path) -> None:
    # Where a package is shown by itself, a relative link leads nowhere.
    assert "](" not in prose(page).replace("](https://", "")


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = run(
        *(BIN / "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_every_page_is_in_the_navigation() -> None:
    config = yaml.safe_load(text(ROOT / "mkdocs.yml"))
    listed = [page for entry in config["nav"] for page in entry.values()]
    assert sorted(listed) == sorted(page.name for page in DOCS.glob("*.md"))


@each_page
def test_make_has_every_target_that_is_named(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", text(ROOT / "Makefile"), re.MULTILINE))
    named = [span.split() for span in spans(page) if span.startswith("make ")]
    named += [words for words in commands(page) if words[0] == "make"]
    assert {word for words in named for word in words[1:]} <= targets


def test_the_map_of_the_source_is_whole() -> None:
    page = ROOT / "CONTRIBUTING.md"
    core = ROOT / "attnquant-core/src/attnquant"
    expected = {
        str(path.relative_to(core))
        for path in core.rglob("*.py")
        if path.name != "__init__.py" and not {"cli", "testing"} & set(path.parts)
    }
    gemma3 = ROOT / "attnquant-gemma3/src/attnquant_gemma3"
    mapped = set()
    for row in table(page, "Map, in the order data flows"):
        ours, _, theirs = row[1].partition(";")
        mapped |= set(re.findall(r"`([\w/]+\.py)`", ours))
        for name in re.findall(r"`(\w+\.py)`", theirs):
            assert (gemma3 / name).is_file(), name
    assert mapped == expected


def test_test_markers_are_listed() -> None:
    config = tomllib.loads(text(ROOT / "pyproject.toml"))
    markers = config["tool"]["pytest"]["ini_options"]["markers"]
    rows = first_column(ROOT / "CONTRIBUTING.md", "Tests")
    assert rows == [marker.partition(":")[0] for marker in markers]


@each_page
def test_scripts_that_are_shown_exist(page: Path) -> None:
    for words in commands(page):
        for word in words:
            if word.endswith(".py"):
                # The story of a package names files of that package.
                homes = (ROOT, *(ROOT / "tests-integration/thirdparty").iterdir())
                assert any((home / word).is_file() for home in homes), word


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_every_package_carries_the_licence(package: Path) -> None:
    licence = text(ROOT / "LICENSE")
    assert "Apache License\n                           Version 2.0" in licence
    assert (package / "LICENSE").read_text(encoding="utf-8") == licence
    assert not (package / "LICENSE").is_symlink()
