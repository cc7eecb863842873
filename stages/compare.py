"""Compare all methods: a page, its numbers as JSON, its curves as CSV, the claims."""

from contextlib import ExitStack
from pathlib import Path

from pydantic import Field

from moecore.core.config import Config
from moecore.core.files import atomic_file, write_json
from moecore.core.safetensors_files import write_tensors
from moecore.report.claims import evaluation
from moecore.report.claims.evaluation import list_unasked_controls
from moecore.report.claims.result_evidence import ITEMS, NUMBERS, pack_items
from moecore.report.report_files import render_report_files
from moecore.report.results import read_results
from moecore.report.tables.metrics_by_method import compare_methods
from moecore.report.tables.terminal_summary import first_sentence
from moecore.run.inputs import params_path, read_stage_inputs, refuse_changed_document
from moecore.run.stage_entry import run_stage
from moecore.study.document import load_yaml_document
from moecore.study.layers import list_folder_stages
from moecore.study.sections import Claim, Question, Selection
from moecore.study.settings import read_params

ARTIFACTS = Path("artifacts")  # the stage `numbers` copies from there to reports/


class Params(Config):
    run: Selection
    claims: tuple[Claim, ...] = Field((), description="Claims of papers about two methods.")
    questions: tuple[Question, ...] = Field((), description="Questions that no paper answers.")


def compare() -> None:
    params = read_params(Params)
    inputs = read_stage_inputs("compare", params, [])
    path = Path(params_path())
    document = load_yaml_document(path)
    text = path.read_text(encoding="utf-8")
    results = read_results(params.run, text, stages=list_folder_stages(path.parent))
    asked = [*params.claims, *params.questions]
    answerable = evaluation.choose_answerable_comparisons(asked, params.run, results)
    answerable += list_unasked_controls(results, answerable)
    evaluated = evaluation.evaluate_claims(answerable, results)
    compared = compare_methods(results) | evaluation.compare_json_claims(evaluated, document.data)
    compared["first_sentence"] = {"text": first_sentence(results)}
    inputs.refuse_all_edits()
    refuse_changed_document(document)
    with ExitStack() as written:  # if the disk is full, the old numbers and page stay
        for name, text in render_report_files(results, evaluated).items():
            written.enter_context(atomic_file(Path("reports", name))).write_bytes(text.encode())
        write_json(ARTIFACTS / NUMBERS.name, compared)
        write_tensors(ARTIFACTS / ITEMS.name, pack_items(evaluated, compared))


if __name__ == "__main__":
    run_stage(compare)
