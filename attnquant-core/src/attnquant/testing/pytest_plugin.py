"""The conformance kit as a pytest plugin: two markers, three options.

Installed with attnquant-core, it is loaded by every pytest run; it imports nothing but
pytest until a test asks for more.
"""

from __future__ import annotations

import pytest

from attnquant.testing.parts import PARTS

MARKER = "attnquant"
APPLIES = "attnquant_applies"

pytest.register_assert_rewrite("attnquant.testing.conformance", "attnquant.testing")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the kit's options."""
    group = parser.getgroup("attnquant", "AttnQuant's conformance kit")
    group.addoption(
        "--attnquant-parts",
        metavar="PART[,PART]",
        help="run these parts of the conformance kit only: " + ", ".join(PARTS),
    )
    group.addoption(
        "--attnquant-plugin",
        metavar="NAME",
        help="run nothing but the conformance tests of this plugin",
    )
    group.addoption(
        "--attnquant-all-graphs",
        action="store_true",
        help="compile every formulation at passthrough as well",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and check the options."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(part): belongs to a part of AttnQuant's conformance kit: "
        + ", ".join(PARTS),
    )
    config.addinivalue_line(
        "markers",
        f"{APPLIES}(predicate): collected where the predicate is true of the model",
    )
    for part in _parts(config):
        if part not in PARTS:
            msg = f"--attnquant-parts: expected {', '.join(PARTS)}, found {part!r}"
            raise pytest.UsageError(msg)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Leave out what the options do not ask for, and what does not apply."""
    parts = _parts(config)
    name = config.getoption("--attnquant-plugin")
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        mark = item.get_closest_marker(MARKER)
        wanted = mark is not None if name else True
        if mark is not None:
            wanted = not parts or mark.args[0] in parts
            wanted = wanted and (name is None or _plugin_of(item) == name)
            wanted = wanted and _applies(item)
        (kept if wanted else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def _parts(config: pytest.Config) -> tuple[str, ...]:
    text: str | None = config.getoption("--attnquant-parts")
    return tuple(part.strip() for part in text.split(",")) if text else ()


def _plugin_of(item: pytest.Item) -> str | None:
    # Every class of the kit knows it; asking loads the plugins.
    cls = getattr(item, "cls", None)
    return cls.plugin_name() if cls is not None else None


def _applies(item: pytest.Item) -> bool:
    cls = getattr(item, "cls", None)
    marks = item.iter_markers(APPLIES)
    return cls is None or all(mark.args[0](cls()) for mark in marks)
