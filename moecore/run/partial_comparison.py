"""Compare a study that was run in part: choose the claims and questions that it can answer."""

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from moecore.report.claims.evaluation import describe_method_without_metric
from moecore.report.study_results import Results
from moecore.study.sections import Claim, Comparison, Selection

AnyComparison = TypeVar("AnyComparison", bound=Comparison)


def split_answerable_comparisons(
    comparisons: Iterable[AnyComparison], run: Selection
) -> tuple[list[AnyComparison], list[AnyComparison]]:
    """Return claims and questions whose methods, phase and seeds are in ``run``, and the others."""
    answerable: list[AnyComparison] = []
    waiting: list[AnyComparison] = []
    for comparison in comparisons:
        methods = {comparison.method, comparison.against}
        has_models = methods <= set(run.methods) and comparison.phase in run.phases
        has_seeds = len(run.seeds) > 1 or not isinstance(comparison, Claim)
        is_calculated = methods <= set(run.calculations)
        chosen = answerable if is_calculated or (has_models and has_seeds) else waiting
        chosen.append(comparison)
    return answerable, waiting


def choose_answerable_comparisons(
    comparisons: Iterable[AnyComparison], run: Selection, results: Results
) -> list[AnyComparison]:
    """Return the claims and questions that ``results`` answer; explain the others on stderr."""
    candidates, waiting = split_answerable_comparisons(comparisons, run)
    if waiting:
        print(describe_waiting_claims(waiting, run), file=sys.stderr)
    answerable = []
    for comparison in candidates:
        # ``moecore check`` does not foresee every missing metric.
        if missing := describe_method_without_metric(comparison, results):
            text = f"{comparison.words}, {comparison.phase}: {missing}"
            print(f"not answered: {text}", file=sys.stderr)
        else:
            answerable.append(comparison)
    return answerable


def describe_waiting_claims(waiting: Sequence[Comparison], run: Selection) -> str:
    """Return a line with the missing methods, phases and seeds of claims and questions."""
    named = [name for comparison in waiting for name in (comparison.method, comparison.against)]
    missing = [f"method {name}" for name in dict.fromkeys(named) if name not in run.methods]
    phases = dict.fromkeys(comparison.phase for comparison in waiting)
    missing += [f"phase {phase}" for phase in phases if phase not in run.phases]
    if len(run.seeds) < 2 and any(isinstance(comparison, Claim) for comparison in waiting):
        missing.append("a second seed")
    return f"{len(waiting)} claims and questions wait for {', '.join(missing)}"
