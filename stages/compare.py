"""Stage ``compare``: writes the report's page, compare.json, curves and claims of a study."""

from contextlib import ExitStack
from pathlib import Path

from pydantic import Field

from moecore.core.config import Config
from moecore.core.files import atomic_file, write_json
from moecore.core.safetensors_files import write_tensors
from moecore.report.claims import evaluation
from moecore.report.claims.evaluation import list_unasked_controls
from moecore.report.claims.result_evidence import ITEMS, NUMBERS, pack_item_values
from moecore.report.report_files import render_report_files
from moecore.report.results_and_displays import read_results
from moecore.report.tables.metrics_by_method import compare_methods
from moecore.report.tables.terminal_summary import main_result_sentence
from moecore.run.stage_entry import run_stage
from moecore.run.stage_inputs import params_path, read_stage_inputs, refuse_changed_document
from moecore.study.params_layers import list_dvc_stages
from moecore.study.params_reader import read_params
from moecore.study.run_and_claims import Claim, Question, RunSelection
from moecore.study.yaml_document import load_yaml_document

ARTIFACTS = Path("artifacts")  # the stage `numbers` copies from there to reports/


class Params(Config):
    run: RunSelection
    claims: tuple[Claim, ...] = Field((), description="Claims of papers about two methods.")
    questions: tuple[Question, ...] = Field((), description="Questions that no paper answers.")


def compare() -> None:
    params = read_params(Params)
    inputs = read_stage_inputs("compare", params, [])
    path = Path(params_path())
    document = load_yaml_document(path)
    text = path.read_text(encoding="utf-8")
    results = read_results(params.run, text, stages=list_dvc_stages(path.parent))
    asked = [*params.claims, *params.questions]
    answerable = evaluation.choose_answerable_comparisons(asked, params.run, results)
    answerable += list_unasked_controls(results, answerable)
    evaluated = evaluation.evaluate_claims(answerable, results)
    compared = compare_methods(results) | evaluation.claims_for_compare_json(
        evaluated, document.data
    )
    compared["first_sentence"] = {"text": main_result_sentence(results)}
    inputs.refuse_all_edits()
    refuse_changed_document(document)
    with ExitStack() as written:  # if the disk is full, the old numbers and page stay
        for name, text in render_report_files(results, evaluated).items():
            written.enter_context(atomic_file(Path("reports", name))).write_bytes(text.encode())
        write_json(ARTIFACTS / NUMBERS.name, compared)
        write_tensors(ARTIFACTS / ITEMS.name, pack_item_values(evaluated, compared))


if __name__ == "__main__":
    run_stage(compare)
