"""A new model package: from templates, or from a package that is installed.

The files of every model package have the same names and hold the same things, so the
places that need a decision are found in any of them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path

from attnquant.errors import SettingError
from attnquant.theta.directory import whole_directory

MARK = "# DECIDE:"
"""What every line that asks for a decision begins with."""

PLAIN = "plain"
SOURCES: Mapping[str, str] = {
    PLAIN: "a decoder whose layers are all alike: the least there is to change",
    "gemma3": "sliding and full layers, each with a cache of their own",
    "gemma4": "layers of several shapes, groups, missing projections, images",
}
"""What a package can be made from."""

_NAME_RE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_ARCHITECTURE_RE = re.compile(r"[A-Za-z_]\w*")

DECISIONS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "plugin.py": (
        (r"ARCHITECTURE = ", "the name in `architectures` of your `config.json`"),
        (
            r"PREFIX_MAP = ",
            "how checkpoints name tensors; list under `ignored` what no model needs",
        ),
        (
            r"@hookimpl\ndef attnquant_w0_group",
            "which layers may share a base (one shape!), and what is absent or dense",
        ),
        (
            r"@hookimpl\ndef attnquant_kv_params",
            "one cache for all layers, or one for each kind",
        ),
    ),
    "arch.py": (
        (
            r"\w+ = SupportedArchitecture\(",
            "example checkpoints, the tokenizer, parsers of tools and reasoning",
        ),
    ),
    "model_config.py": (
        (r"@dataclass", "which of MAX's configs reads yours"),
        (r"    def projection_dims", "(out, in) of each projection that a layer has"),
        (
            r"def _?check_supported",
            "which fields ask for what the graph does not compute: refuse each by name",
        ),
    ),
    "weight_adapters.py": (
        (r"convert_\w+ = ", "tensors that the graph names otherwise, or does without"),
    ),
    "model.py": (
        (r"class ", "whether core's pipeline model of text will do, or one of MAX's"),
    ),
    "*_attnquant.py": (
        (r"class ", "the scale of embeddings, the last norm, the activation"),
    ),
    "attention.py": (
        (
            r"class ",
            "norms of queries and keys, scale, windows, biases, rotary embeddings",
        ),
    ),
    "transformer_block.py": (
        (r"class ", "which norms there are, and where residuals are added"),
    ),
    "test_conformance.py": (
        (r"    config = ", "a tiny config of yours, with no two dimensions equal"),
        (r"    def tensor_shapes", "every tensor of a checkpoint, under its own name"),
        (
            r"    def reference",
            "an implementation in numpy that shares no code with the package",
        ),
    ),
    "oracle.py": ((r"def forward", "whatever your model does differently"),),
}
"""For each file, where a decision is needed (a pattern at the start of a line), and
what to decide."""


@dataclass(frozen=True)
class NewModel:
    """What a package is called.

    Attributes:
        name: Of the plugin; the distribution is ``attnquant-{name}``.
        architecture: As in the ``architectures`` of `config.json`.
        source: One of `SOURCES`.
    """

    name: str
    architecture: str
    source: str

    def __post_init__(self) -> None:
        """Refuse names that are no names.

        Raises:
            SettingError: Naming the argument.
        """
        if not _NAME_RE.fullmatch(self.name):
            raise SettingError(
                "NAME",
                expected="lower-case letters, digits and single underscores, such as"
                " mymodel",
                found=repr(self.name),
            )
        if not _ARCHITECTURE_RE.fullmatch(self.architecture):
            raise SettingError(
                "--architecture",
                expected="the name of a class, such as MyModelForCausalLM",
                found=repr(self.architecture),
            )

    @property
    def distribution(self) -> str:
        """The distribution's name, as package indexes write it."""
        return "attnquant-" + self.name.replace("_", "-")

    @property
    def class_name(self) -> str:
        """The name as part of a class's."""
        return class_name(self.name)


def class_name(name: str) -> str:
    """Return ``my_model`` as ``MyModel``."""
    return "".join(part.capitalize() for part in name.split("_"))


def write_package(new: NewModel, out: Path) -> list[Path]:
    """Write a package.

    Args:
        new: What it is called, and what it is made from.
        out: Its folder, which must not exist.

    Returns:
        The files, relative to the folder.

    Raises:
        SettingError: If the folder exists, or what it is to be made from is not
            installed.
    """
    if out.exists():
        raise SettingError(
            "--out", expected="a folder that does not exist", found=str(out)
        )
    files = {Path("LICENSE"): _LICENCE, **dict(_files(new))}
    with whole_directory(out, "package") as staged:
        for path, text in files.items():
            target = staged / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(with_marks(path.name, text), encoding="utf-8")
        _tidy(staged)
    return sorted(files)


def _tidy(folder: Path) -> None:
    """Order imports and break lines, which depends on how long the names are."""
    if find_spec("ruff") is None:
        # It comes with the package's own extra `dev`, and can be run then.
        return
    for command in (["check", "--select", "I", "--fix"], ["format"]):
        done = subprocess.run(  # noqa: S603 (our own interpreter)
            [sys.executable, "-m", "ruff", *command, "--quiet", "--no-cache", "."],
            cwd=folder,
            env=dict(os.environ),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SettingError(
                "ruff " + command[0], expected="tidy files", found=done.stdout.strip()
            )


_LICENCE = f"""{MARK} the licence you publish under.
"""


def with_marks(file: str, text: str) -> str:
    """Return a file's text with a line above each place that needs a decision."""
    key = "*_attnquant.py" if file.endswith("_attnquant.py") else file
    for pattern, decision in DECISIONS.get(key, ()):
        line = rf"^(?P<found>(?P<indent> *){pattern.lstrip()})"
        found = re.search(line, text, re.MULTILINE)
        if found:
            mark = f"{found['indent']}{MARK} {decision}.\n"
            text = text[: found.start()] + mark + text[found.start() :]
    return text


def _files(new: NewModel) -> Iterator[tuple[Path, str]]:
    templates = resources.files("attnquant.cli") / "templates"
    yield from _from_templates(new, templates / "common", Path())
    yield from _from_templates(new, templates / new.source, Path())
    yield Path("src", f"attnquant_{new.name}", "py.typed"), ""
    if new.source != PLAIN:
        yield from _from_package(new)


def _from_templates(
    new: NewModel, folder: Traversable, below: Path
) -> Iterator[tuple[Path, str]]:
    for entry in folder.iterdir():
        path = below / _filled(new, entry.name.removesuffix(".tmpl"))
        if entry.is_dir():
            yield from _from_templates(new, entry, path)
        elif entry.name.endswith(".tmpl"):
            yield path, _filled(new, entry.read_text(encoding="utf-8"))


def _filled(new: NewModel, text: str) -> str:
    return (
        text.replace("attnquant-@NAME@", new.distribution)
        .replace("@NAME@", new.name)
        .replace("@CLASS@", new.class_name)
        .replace("@ARCHITECTURE@", new.architecture)
    )


def _from_package(new: NewModel) -> Iterator[tuple[Path, str]]:
    """Yield the sources of an installed package under the new names."""
    old = new.source
    # Not imported: only read.
    spec = find_spec(f"attnquant_{old}")
    if spec is None or spec.origin is None:
        raise SettingError(
            "--from",
            expected=f"an installed package attnquant-{old}",
            found="none",
            hint=f"Run `{sys.executable} -m pip install attnquant-{old}`.",
        )
    source = Path(spec.origin).parent
    for path in sorted(source.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for before, after in (
            (f"attnquant_{old}", f"attnquant_{new.name}"),
            (f"{old}_attnquant", f"{new.name}_attnquant"),
            (f"AttnQuant{class_name(old)}", f"AttnQuant{new.class_name}"),
            (f"{old}_unified_attnquant", f"{new.name}_unified_attnquant"),
        ):
            text = text.replace(before, after)
        if path.name == "plugin.py":
            text = _with_architectures(new, text)
        relative = path.relative_to(source)
        name = relative.name.replace(f"{old}_attnquant", f"{new.name}_attnquant")
        yield Path("src", f"attnquant_{new.name}", relative.with_name(name)), text


def _with_architectures(new: NewModel, text: str) -> str:
    """Put the new architecture for the first that is named, and variants for others."""
    names = re.findall(r'^\w*ARCHITECTURE = "(\w+)"$', text, re.MULTILINE)
    for index, name in enumerate(names):
        variant = new.architecture + (f"Variant{index}" if index else "")
        text = text.replace(f'"{name}"', f'"{variant}"')
    return text
