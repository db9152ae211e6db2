"""Tables and sizes."""

from __future__ import annotations

import pytest

from attnquant.cli.text import format_table
from attnquant.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (536_220_000, "536.2 MB"),
        (2_000_000_000, "2.0 GB"),
        (3 * 10**12, "3.0 TB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_a_size_is_in_decimal_units(count: int, expected: str) -> None:
    assert expected == format_bytes(count)


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    table = format_table(("a", "long"), [("wide", "1"), ("b", "")])
    assert table.splitlines() == ["a     long", "wide  1", "b"]


def test_a_table_may_have_no_rows() -> None:
    assert format_table(("a", "b"), []) == "a  b"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4000", 4000),
        ("-1", -1),
        ("7B", 7),
        ("500MB", 500_000_000),
        ("1.5 GB", 1_500_000_000),
        ("0.001kB", 1),
        ("2TB", 2_000_000_000_000),
    ],
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert expected == parse_bytes(text)


@pytest.mark.parametrize(
    "text", ["", "MB", "x", "1.5", "1mb", "1GiB", "nan", "inf", "1e999999GB GB", "1 2"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_bytes(text)
