"""The map of experts is as square as their number allows."""

import pytest

from moecore.nn.expert_map import map_shape


@pytest.mark.parametrize(
    ("experts", "shape"),
    [
        (1, (1, 1)),
        (2, (1, 2)),
        (7, (1, 7)),
        (8, (2, 4)),
        (12, (3, 4)),
        (16, (4, 4)),
        (32, (4, 8)),
        (128, (8, 16)),
        (400, (20, 20)),
    ],
)
def test_shapes(experts, shape):
    assert map_shape(experts) == shape
