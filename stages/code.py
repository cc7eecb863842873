"""Stage ``code``: hashes of the source files that decide results.

It always runs, as its sources are wherever moecore is installed. The other stages depend on its
result artifacts/code/ instead of the source, so they rerun exactly when a file or part that they
use is edited. As the first stage it also checks params.yaml, the data and the models. It does
nothing if neither its inputs nor its result have changed.
"""

from pathlib import Path

from moecore.core.source_layout import PROJECT_ANSWERS
from moecore.pipeline.code_hashes import code_inputs, is_code_written, remember_code, write_code
from moecore.pipeline.project import read_answers
from moecore.run.inputs import params_path, refuse_changed_document
from moecore.run.stage_entry import run_stage
from moecore.study.document import load_yaml_document


def code() -> None:
    if Path(PROJECT_ANSWERS).is_file():
        read_answers(Path())  # refuses a newer project
    document = load_yaml_document(params_path())
    inputs = code_inputs(document)
    if is_code_written(inputs, document):
        return
    check_models(document.path)
    write_code(document.path)
    refuse_changed_document(document)
    remember_code(inputs)


def check_models(path: str) -> None:
    """Raise UserError if params.yaml, its data or its models do not fit."""
    from moecore.report.tables.metrics_by_method import unfit_metric_problems  # imports torch
    from moecore.study.check import check_study

    check_study(path, Path(), unfit_metric_problems)


if __name__ == "__main__":
    run_stage(code)
