"""Whether data can tell routers apart: a learned router against experts chosen by a fixed hash.

Where this control includes 0, a difference of accuracy between routers says little about routing
(assay sensitivity), whatever its verdict.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moecore.report.claims.significance import differences_from
from moecore.report.column import score_slug
from moecore.report.study_results import Phase, Results, parse_settings
from moecore.report.tables.cells import NumberFormat
from moecore.report.tables.metrics_by_method import phase_result_columns
from moecore.statistics.intervals import Interval
from moecore.study.sections import Comparison, Question, compared_quantity_key

ASKS = "can these data tell routers apart: is a learned router better than a fixed hash?"
LEARNED, FIXED = "noisy_top_k", "hash"  # kinds of routers
USUAL = "vmoe"  # the learned router, where several have the hash's experts
EQUAL = ("experts", "blocks", "model")  # settings that the two methods share


class ControlPair(NamedTuple):
    """Two methods that differ in their router alone: a learned one and a hash."""

    learned: str
    fixed: str


def find_control_pair(methods: Mapping[str, Mapping[str, Any] | None]) -> ControlPair | None:
    """Return the pair with equal experts, blocks and k among the methods of a params.yaml."""
    routers = {name: (settings or {}).get("router") or {} for name, settings in methods.items()}
    for fixed in (name for name, router in routers.items() if router.get("kind") == FIXED):
        partners = [
            name
            for name, router in routers.items()
            if router.get("kind") == LEARNED
            and router.get("k") == routers[fixed].get("k")
            and all(
                (methods[name] or {}).get(key) == (methods[fixed] or {}).get(key) for key in EQUAL
            )
        ]
        if partners:
            return ControlPair(USUAL if USUAL in partners else partners[0], fixed)
    return None


def find_trained_pair(results: Results) -> ControlPair | None:
    """Return the pair among the methods that a study trained; None if it lacks one of them."""
    methods = parse_settings(results.settings).get("methods") or {}
    return find_control_pair({name: methods.get(name) for name in results.methods})


def list_unasked_controls(results: Results, asked: Sequence[Comparison]) -> list[Question]:
    """Return the control of each phase with two seeds or more that ``asked`` does not have."""
    pair = find_trained_pair(results)
    if pair is None:
        return []
    keys = {compared_quantity_key(comparison.model_dump()) for comparison in asked}
    questions = [
        Question(
            asks=ASKS,
            metric=f"test_{score_slug(phase.task.score)}",
            method=pair.learned,
            against=pair.fixed,
            better=phase.task.score.better,
            phase=phase.name,
        )
        for phase in results.phases.values()
        if phase.seeds > 1
    ]
    return [asks for asks in questions if compared_quantity_key(asks.model_dump()) not in keys]


def describe_sensitivity(results: Results, phase: Phase) -> str:
    """Return "vmoe − hash_moe = −0.9 pp [−2.1 to +0.3]: …", what the data can show; "" unknown."""
    pair = find_trained_pair(results)
    score = f"test_{score_slug(phase.task.score)}"
    column = next((column for column in phase_result_columns(phase) if column.name == score), None)
    if pair is None or column is None:
        return ""
    models = {name: phase.models[name] for name in pair}
    tested = differences_from(column, models, pair.fixed).get(pair.learned)
    if tested is None or tested.difference.limits is None:
        return ""
    number_format = NumberFormat.of(column.form, [tested.difference])
    shown = number_format.difference(tested.difference.value)
    limits = number_format.difference_limits(tested.difference)
    can = "can" if excludes_zero(tested.difference) else "are not shown to"
    return (
        f"{pair.learned} − {pair.fixed} = {shown} [{limits}]: these data {can} tell routers apart"
    )


def excludes_zero(difference: Interval) -> bool:
    """Return whether an interval is known and lies on one side of 0."""
    return difference.limits is not None and math.prod(difference.limits) > 0
