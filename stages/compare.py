"""Set all methods side by side: a page, its numbers as JSON, its curves as CSV, the claims."""

import sys
from contextlib import ExitStack
from pathlib import Path

from pydantic import Field

from moecore.core.config import Config
from moecore.core.files import whole_file
from moecore.report.claims.evaluation import evaluate_claims, flat_evaluated
from moecore.report.results import read_results
from moecore.report.tables.comparison import compare_methods
from moecore.report.texts import report_files
from moecore.run import partial_run
from moecore.run.inputs import params_path, refuse_changed_document
from moecore.run.stage import run_stage
from moecore.study.reading.claims_section import Claim, Question
from moecore.study.reading.document import load_yaml
from moecore.study.reading.overlay import load_stages
from moecore.study.reading.params import read_params
from moecore.study.reading.run_section import Selection


class Params(Config):
    run: Selection
    claims: tuple[Claim, ...] = Field(
        (), description="What the papers say of two methods; evaluated by these runs."
    )
    questions: tuple[Question, ...] = Field(
        (), description="What no paper says of two methods; asked of these runs."
    )


def compare() -> None:
    params = read_params(Params)
    path = Path(params_path())
    document = load_yaml(str(path))
    stages = load_stages(path.parent)
    results = read_results(params.run, path.read_text(encoding="utf-8"), stages=stages)
    asked, waiting = partial_run.split_waiting([*params.claims, *params.questions], params.run)
    if waiting:
        print(partial_run.describe_waiting(waiting, params.run), file=sys.stderr)
    evaluated = evaluate_claims(asked, results)
    claims = flat_evaluated(evaluated, document.data)
    compared = compare_methods(results) | claims
    refuse_changed_document(document)
    with ExitStack() as written:  # of a page that finds no room, the numbers are not replaced
        for name, text in report_files(results, evaluated).items():
            written.enter_context(whole_file(Path("reports", name))).write_bytes(text.encode())
        left_out = partial_run.list_left_out(path, params.run)
        numbers = partial_run.write_numbers(compared, left_out)
    if left_out:
        print(f"{numbers}: the numbers without {', '.join(left_out)}", file=sys.stderr)


if __name__ == "__main__":
    run_stage(compare)
