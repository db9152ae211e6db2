"""Storage dtypes: bfloat16 is one of numpy's, and exact to widen."""

from __future__ import annotations

import numpy as np
import pytest

from attnquant.errors import SettingError
from attnquant.theta.dtypes import (
    BFLOAT16,
    FLOAT32,
    common_storage_dtype,
    from_safetensors,
    is_floating,
    storage_dtype,
    widen,
)
from core_support.tiny import finite_bfloat16


def test_storage_dtypes_have_names() -> None:
    assert (storage_dtype("float32"), storage_dtype("bfloat16")) == (FLOAT32, BFLOAT16)


@pytest.mark.parametrize("name", ["float16", "bf16", "", "int8"])
def test_another_storage_dtype_is_refused(name: str) -> None:
    with pytest.raises(SettingError) as caught:
        storage_dtype(name)
    assert caught.value.subject == "dtype"
    assert caught.value.expected == "one of float32, bfloat16"
    assert caught.value.found == repr(name)


def test_a_bfloat16_is_the_upper_half_of_a_float32() -> None:
    values = finite_bfloat16()
    expected = values.view(np.uint16).astype(np.uint32) << 16
    np.testing.assert_array_equal(widen(values).view(np.uint32), expected)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["bfloat16", "bfloat16"], "bfloat16"),
        (["float32"], "float32"),
        (["float16"], "float32"),
        (["bfloat16", "float32"], "float32"),
        ([], "float32"),
    ],
)
def test_theta_is_stored_in_the_projections_common_dtype(
    names: list[str], expected: str
) -> None:
    assert expected == common_storage_dtype(names)


def test_a_safetensors_code_has_a_dtype_or_none() -> None:
    assert from_safetensors("BF16") == BFLOAT16
    assert from_safetensors("F8_E4M3") is None


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(BFLOAT16, True), (FLOAT32, True), (np.float16, True), (np.int32, False)],
)
def test_bfloat16_is_floating(dtype: np.dtype, expected: bool) -> None:
    assert expected == is_floating(np.dtype(dtype))
