"""A study of which a part is run: which claims and questions wait for the rest."""

import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

from moecore.report.claims.evaluation import describe_missing_metric
from moecore.report.typed_results import Results
from moecore.study.sections import Claim, Comparison, Selection

AnyComparison = TypeVar("AnyComparison", bound=Comparison)


def split_answerable_comparisons(
    comparisons: Iterable[AnyComparison], run: Selection
) -> tuple[list[AnyComparison], list[AnyComparison]]:
    """Return the claims and questions that ``run`` can answer, and those that wait."""
    ready: list[AnyComparison] = []
    waiting: list[AnyComparison] = []
    for one in comparisons:
        known = {one.method, one.against} <= set(run.methods) and one.phase in run.phases
        enough = len(run.seeds) > 1 or not isinstance(one, Claim)
        (ready if known and enough else waiting).append(one)
    return ready, waiting


def choose_answerable_comparisons(
    comparisons: Iterable[AnyComparison], run: Selection, results: Results
) -> list[AnyComparison]:
    """Return the claims and questions that ``results`` answer; say on stderr why not the others.

    Some wait for the rest of a study. Of others a method has no such metric, which ``moecore
    check`` does not always foresee; that must not cost the answers to the rest.
    """
    ready, waiting = split_answerable_comparisons(comparisons, run)
    if waiting:
        print(describe_waiting_claims(waiting, run), file=sys.stderr)
    answerable = []
    for one in ready:
        if lack := describe_missing_metric(one, results):
            print(f"not answered: {one.words}, {one.phase}: {lack}", file=sys.stderr)
        else:
            answerable.append(one)
    return answerable


def describe_waiting_claims(waiting: Sequence[Comparison], run: Selection) -> str:
    """Return one line that says what the waiting claims and questions wait for."""
    named = [name for one in waiting for name in (one.method, one.against)]
    lacking = [f"method {name}" for name in dict.fromkeys(named) if name not in run.methods]
    phases = dict.fromkeys(one.phase for one in waiting if one.phase not in run.phases)
    lacking += [f"phase {phase}" for phase in phases]
    if len(run.seeds) < 2 and any(isinstance(one, Claim) for one in waiting):
        lacking.append("a second seed")
    return f"{len(waiting)} claims and questions wait for {', '.join(lacking)}"
