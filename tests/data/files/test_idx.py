"""IDX files: what is read is what was written; every kind of damage is one clear error."""

import gzip
import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moecore.core.files import UserError
from moecore.data.files.idx import read_idx
from tests.data.making import idx_bytes

IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


@given(
    arrays.arrays(np.uint8, arrays.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5)),
    st.booleans(),
)
def test_round_trip(tmp_path_factory, array, packed):
    path = tmp_path_factory.mktemp("idx") / "file"
    content = idx_bytes(array)
    path.write_bytes(gzip.compress(content) if packed else content)
    read = read_idx(path, array.ndim, hashlib.sha256(content).hexdigest())
    assert read.dtype == np.uint8 and np.array_equal(read, array)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "starts with nothing"),
        (
            b"\x00\x00\x0d\x03" + idx_bytes(IMAGES)[4:],
            "starts with 00 00 0d 03; allowed: 00 00 08 03",
        ),
        (idx_bytes(IMAGES[0]), "starts with 00 00 08 02"),
        (idx_bytes(IMAGES)[:10], "expected a header of 16 bytes, found 10"),
        (idx_bytes(IMAGES)[:-1], "expected 40 bytes (sizes (2, 3, 4) in its header), found 39"),
        (idx_bytes(IMAGES) + b"x", "found 41"),
        (gzip.compress(idx_bytes(IMAGES), mtime=0)[:-9], "damaged or truncated gzip file"),
        (b"\x1f\x8b" + b"rubbish, not gzip at all", "damaged or truncated gzip file"),
    ],
)
def test_damage_is_named(tmp_path, content, said):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_idx(path, 3)
    assert str(path) in str(error.value) and said in str(error.value)


def test_other_checksum_and_missing_file(tmp_path):
    path = tmp_path / "images"
    path.write_bytes(idx_bytes(IMAGES))
    with pytest.raises(UserError, match="its content has sha256 .*; the published file has abc"):
        read_idx(path, 3, "abc")
    with pytest.raises(UserError, match="absent: no such file"):
        read_idx(tmp_path / "absent", 3)
