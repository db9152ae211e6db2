"""The oracle against the definition, written out, and against wrong arguments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnquant_kernels
from attnquant_kernels import generated_linear

SIZES = st.integers(0, 5)


@given(rows=SIZES, width=SIZES, out=SIZES, rank=SIZES, seed=st.integers(0, 99))
def test_equals_the_effective_weight_applied(
    rows: int, width: int, out: int, rank: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    x, w0 = rng.normal(size=(rows, width)), rng.normal(size=(out, width))
    u, s = rng.normal(size=(out, rank)), rng.normal(size=rank)
    v = rng.normal(size=(rank, width))
    effective = w0 + u @ np.diag(s) @ v
    expected = np.array([[row @ weight for weight in effective] for row in x])
    y = generated_linear(x, w0, u, s, v)
    assert y.shape == (rows, out)
    np.testing.assert_allclose(y, expected.reshape(rows, out), atol=1e-12)


def test_without_factors_it_is_a_plain_linear() -> None:
    x, w0 = np.ones((2, 3)), np.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(generated_linear(x, w0), x @ w0.T)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("x", (3,), "x: expected shape [rows, in], found [3]"),
        ("w0", (4, 5), "w0: expected shape [out, in=3], found [4, 5]"),
        ("u", (4, 3), "u: expected shape [out=4, r=2], found [4, 3]"),
        ("s", (2, 1), "s: expected shape [r], found [2, 1]"),
        ("v", (2, 4), "v: expected shape [r=2, in=3], found [2, 4]"),
    ],
)
def test_shapes_that_disagree_are_refused_by_name(
    name: str, shape: tuple[int, ...], expected: str
) -> None:
    shapes = {"x": (1, 3), "w0": (4, 3), "u": (4, 2), "s": (2,), "v": (2, 3)}
    arguments = {
        key: np.zeros(value) for key, value in (shapes | {name: shape}).items()
    }
    with pytest.raises(ValueError, match=name) as refused:
        generated_linear(**arguments)
    assert str(refused.value) == expected


def test_one_factor_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="v: expected with the other factors"):
        generated_linear(np.ones((1, 2)), np.ones((3, 2)), np.ones((3, 1)), np.ones(1))


def test_the_mojo_package_is_where_it_says() -> None:
    assert (attnquant_kernels.mojo_package() / "__init__.mojo").is_file()
