"""Both theorems on a small sweep."""

import math

import pytest
from pydantic import ValidationError

from moecore.measure.linear_experts import (
    FirstRow,
    LinearExperts,
    Result,
    SecondRow,
    error_at_90,
    measure,
    ratio_at_90,
)

SETTINGS = LinearExperts(
    dimension=24,
    rank=2,
    samples=6,
    experts=(2, 4, 8),
    angles=(5, 60, 90),
    targets=("shared", "opposed", "drawn"),
    floor=0.5,
    noise=0.005,
    seeds=(0, 1),
)


@pytest.fixture(scope="module")
def found() -> Result:
    return measure(SETTINGS)


def row(rows, targets, experts, angle) -> FirstRow | SecondRow:
    (one,) = [
        row for row in rows if (row.targets, row.experts, row.angle) == (targets, experts, angle)
    ]
    return one


def test_every_combination_is_there_and_no_bound_fails(found):
    assert len(found.theorem_1) == len(found.theorem_2) == 3 * 3 * 3 and found.draws == 54
    assert found.violations == 0 and found.theorem_2_violations == 0
    assert all(row.violations == 0 for rows in (found.theorem_1, found.theorem_2) for row in rows)


def test_one_over_root_e_at_ninety_degrees(found):
    assert found.ratio_at_90 == {
        str(e): pytest.approx(1 / math.sqrt(e), rel=1e-9) for e in (2, 4, 8)
    }
    assert found.error_at_90 < 1e-9
    for experts in (2, 4, 8):
        assert row(found.theorem_1, "shared", experts, 90).tightness.value == pytest.approx(
            1, rel=1e-6
        )


# As in tests/measure/theory/test_linear_experts.py, with c = cos 60° = 1/2: shared
# √((1 + (E−1)c)/E), opposed √((1 − c)/E).
def test_rows_at_sixty_degrees(found):
    for experts in (2, 4, 8):
        shared, opposed = (
            row(found.theorem_1, targets, experts, 60) for targets in ("shared", "opposed")
        )
        assert shared.ratio.value == pytest.approx(
            math.sqrt((1 + (experts - 1) / 2) / experts), rel=1e-8
        )
        assert opposed.ratio.value == pytest.approx(math.sqrt(1 / 2 / experts), rel=1e-8)
        assert shared.ratio.low == pytest.approx(shared.ratio.high, rel=1e-6), (
            "it does not depend on the draw"
        )
        assert 0 <= shared.tightness.value < 1 and shared.epsilon_2 > 0


def test_the_printed_theorem_fails_where_the_proofs_does_not(found):
    assert found.literal_violations == sum(row.literal_violations for row in found.theorem_1) > 0


def test_theorem_2_promises_where_experts_disagree(found):
    near = row(found.theorem_2, "opposed", 8, 60)
    assert near.promises == 2 and near.ratio_squared.value <= near.gamma <= 1
    assert (
        row(found.theorem_2, "shared", 2, 5).promises == 0
        and row(found.theorem_2, "shared", 2, 5).gamma is None
    )
    assert found.theorem_2_promises == sum(row.promises for row in found.theorem_2)


def test_it_is_the_same_after_json(found):
    assert Result.model_validate_json(found.model_dump_json()) == found


def test_a_sweep_without_ninety_degrees_says_so(found):
    rows = [row for row in found.theorem_1 if row.angle == 60]
    assert ratio_at_90(rows) == {}
    assert error_at_90(rows) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dimension": 8, "rank": 4, "experts": (2, 3)}, "3 subspaces of rank 4 do not fit into 8"),
        ({"rank": 4, "samples": 3}, "3 samples do not span"),
        ({"angles": (91,)}, "90"),
        ({"experts": (1,)}, "2"),
    ],
)
def test_impossible_settings(change, message):
    with pytest.raises(ValidationError, match=message):
        LinearExperts(**change)
