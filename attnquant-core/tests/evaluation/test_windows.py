"""Windows hold every token of a text once, in order, each begun as a sequence is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnquant.errors import SettingError
from attnquant.evaluation.windows import Tokens, cut
from attnquant.texts import Text

TEXT = Text("a text", "its content")
bodies = st.lists(st.integers(3, 90), max_size=60).map(tuple)
starts = st.sampled_from([(), (2,)])


@given(bodies, starts, st.integers(2, 20))
def test_windows_hold_the_text_whole_and_in_order(
    body: tuple[int, ...], start: tuple[int, ...], size: int
) -> None:
    windows = list(Tokens(TEXT, start, body).windows(size))
    assert all(window[: len(start)] == start for window in windows)
    joined = [token for window in windows for token in window[len(start) :]]
    assert joined == list(body)
    assert all(len(window) == size for window in windows[:-1])
    assert all(len(start) < len(window) <= size for window in windows)


@given(st.lists(bodies, max_size=3), starts, st.integers(2, 20))
def test_the_total_is_what_will_be_run(
    several: list[tuple[int, ...]], start: tuple[int, ...], size: int
) -> None:
    prepared = cut([Tokens(TEXT, start, body) for body in several], size)
    run = [window for text in prepared.texts for window in prepared.of(text)]
    assert prepared.total == sum(map(len, run))


def test_a_limit_holds_for_each_text() -> None:
    body = tuple(range(10, 40))
    prepared = cut([Tokens(TEXT, (2,), body), Tokens(TEXT, (2,), body[:5])], 8, 12)
    assert [text.body for text in prepared.texts] == [body[:12], body[:5]]


@pytest.mark.parametrize(
    ("start", "size", "limit", "message"),
    [
        ((), 1, None, "window: expected at least 2, found 1"),
        ((2, 3), 2, None, "window: expected at least 3, found 2"),
        ((), 8, 0, "tokens: expected at least 1, found 0"),
    ],
)
def test_numbers_out_of_range(
    start: tuple[int, ...], size: int, limit: int | None, message: str
) -> None:
    with pytest.raises(SettingError, match=message):
        cut([Tokens(TEXT, start, (7, 8, 9))], size, limit)
