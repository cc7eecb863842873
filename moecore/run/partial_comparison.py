"""A study of which a part is run: what waits for the rest, and where its numbers are written."""

import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from moecore.core.files import whole_file, write_json
from moecore.core.safetensors_files import write_tensors
from moecore.report.claims.evaluation import describe_missing_metric
from moecore.report.claims.kept_items import ITEMS, NUMBERS
from moecore.report.typed_results import Results
from moecore.study.reading.claims_section import Claim, Comparison
from moecore.study.reading.overlay import OVERLAY, resolve_overlay
from moecore.study.reading.run_section import Selection

PARTIAL_NUMBERS = Path("reports/compare.part.json")  # not in git
DVC_NUMBERS = Path("artifacts/compare.json")  # DVC's stage `numbers` copies it to reports/
DVC_ITEMS = Path("artifacts/items.safetensors")

AnyComparison = TypeVar("AnyComparison", bound=Comparison)


def list_left_out_of_overlay(params: Path, run: Selection) -> list[str]:
    """Return the methods and seeds of the overlay beside ``params`` that ``run`` leaves out."""
    folder = params.parent
    root = Path(os.path.relpath(folder.resolve().parents[1]))
    if not ((folder / OVERLAY).is_file() and (root / "params.yaml").is_file()):
        return []
    whole = resolve_overlay(folder, root).document.data["run"]
    methods = set(whole["methods"])
    seeds = set(whole["seeds"])
    if not (methods >= set(run.methods) and seeds >= set(run.seeds)):
        return []
    left_out = [name for name in whole["methods"] if name not in run.methods]
    return left_out + [f"seed {seed}" for seed in whole["seeds"] if seed not in run.seeds]


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


def write_comparison(
    numbers: Mapping[str, Any], items: Mapping[str, Tensor], left_out: Sequence[str]
) -> Path:
    """Write what ``compare`` found; of a part beside those of the whole. Return the file.

    items: of what was judged, see moecore/report/claims/kept_items.py; of a part none are written.
    """
    is_partial = bool(left_out) and NUMBERS.is_file()
    target = PARTIAL_NUMBERS if is_partial else NUMBERS
    write_json(target, numbers)
    if not is_partial:
        write_tensors(ITEMS, items)
    elif not ITEMS.is_file():
        write_tensors(ITEMS, {})
    for committed, copy in ((NUMBERS, DVC_NUMBERS), (ITEMS, DVC_ITEMS)):
        with whole_file(copy) as temporary:
            shutil.copyfile(committed, temporary)
    return target
