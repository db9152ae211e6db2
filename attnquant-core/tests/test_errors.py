"""Errors: one shape of message, facts as attributes, and they survive pickling."""

from __future__ import annotations

import pickle

import pytest

from attnquant import errors
from attnquant.errors import AttnQuantError, BundleError, CheckpointError

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, AttnQuantError)
]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, "x"),
        ({"expected": "a"}, "x: expected a"),
        ({"found": "b"}, "x: found b"),
        ({"expected": "a", "found": "b"}, "x: expected a, found b"),
        ({"expected": "a", "hint": "Do c."}, "x: expected a. Do c."),
        ({"hint": "Do c."}, "x. Do c."),
    ],
)
def test_a_message_says_what_was_expected_and_found(
    facts: dict[str, str], message: str
) -> None:
    assert message == str(AttnQuantError("x", **facts))


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_pickling(kind: type[AttnQuantError]) -> None:
    error = kind("x", expected="a", found="b", hint="c")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert vars(error) == vars(copy)
    assert str(error) == str(copy)


def test_a_bundles_error_is_a_checkpoints() -> None:
    assert issubclass(BundleError, CheckpointError)
