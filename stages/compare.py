"""Stage ``compare``: writes the report's page, compare.json, curves and claims of a study."""

from contextlib import ExitStack
from pathlib import Path

from pydantic import Field

from moecore.core.config import Config
from moecore.core.files import atomic_file, write_json
from moecore.core.safetensors_files import write_tensors
from moecore.report.claims import evaluation
from moecore.report.claims.items_and_dates import COMPARE_JSON_FILE, ITEMS_FILE, pack_item_values
from moecore.report.report_files import render_report_files
from moecore.report.results_and_displays import read_results
from moecore.report.tables import metrics_by_method, terminal_summary
from moecore.run import stage_entry, stage_inputs
from moecore.study import params_layers, params_reader, yaml_document
from moecore.study.run_and_claims import Claim, Question, RunSelection

ARTIFACTS = Path("artifacts")  # the stage `numbers` copies from there to reports/


class Params(Config):
    run: RunSelection
    claims: tuple[Claim, ...] = Field((), description="Claims of papers about two methods.")
    questions: tuple[Question, ...] = Field((), description="Questions that no paper answers.")


def compare() -> None:
    params = params_reader.read_stage_params(Params)
    inputs = stage_inputs.build_stage_inputs("compare", params, [])
    path = Path(stage_inputs.params_path())
    document = yaml_document.load_yaml_document(path)
    text = path.read_text(encoding="utf-8")
    results = read_results(params.run, text, stages=params_layers.list_dvc_stages(path.parent))
    asked = [*params.claims, *params.questions]
    answerable = evaluation.print_and_drop_unanswerable(asked, params.run, results)
    answerable += evaluation.build_control_questions(results, answerable)
    evaluated = evaluation.evaluate_claims(answerable, results)
    compared = metrics_by_method.compare_methods(results) | evaluation.claims_for_compare_json(
        evaluated, document.data
    )
    compared["first_sentence"] = {"text": terminal_summary.main_result_sentence(results)}
    inputs.refuse_all_edits()
    stage_inputs.refuse_changed_document(document)
    with ExitStack() as written:  # if the disk is full, the old numbers and page stay
        for name, text in render_report_files(results, evaluated).items():
            written.enter_context(atomic_file(Path("reports", name))).write_bytes(text.encode())
        write_json(ARTIFACTS / COMPARE_JSON_FILE.name, compared)
        write_tensors(ARTIFACTS / ITEMS_FILE.name, pack_item_values(evaluated, compared))


if __name__ == "__main__":
    stage_entry.run_stage(compare)
