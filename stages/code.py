"""Stage ``code``: checks the study, and writes hashes of the source that decides results.

It always runs, because dvc.yaml cannot list the sources: they lie wherever moecore is installed.
The other stages depend on its result artifacts/code/ instead of the source, so they rerun exactly
when a file or part that they use is edited. As the first stage it also checks params.yaml, the data
and the models. It does nothing if neither its inputs nor its result have changed.
"""

from pathlib import Path

from moecore.core.source_layout import PROJECT_ANSWERS_FILE
from moecore.pipeline import code_hashes, project_record
from moecore.run import stage_entry, stage_inputs
from moecore.study.yaml_document import load_yaml_document


def code() -> None:
    if Path(PROJECT_ANSWERS_FILE).is_file():
        project_record.read_answers(Path())  # refuses a newer project
    document = load_yaml_document(stage_inputs.params_path())
    inputs = code_hashes.digest_code_inputs(document)
    if code_hashes.is_code_up_to_date(inputs, document):
        return
    check_params_data_models(document.path)
    code_hashes.write_all_hashes(document.path)
    stage_inputs.refuse_changed_document(document)
    code_hashes.store_code_digest(inputs)


def check_params_data_models(path: str) -> None:
    from moecore.report.tables.metrics_by_method import unanswerable_claims  # imports torch
    from moecore.study.check import check_study

    check_study(path, Path(), unanswerable_claims)


if __name__ == "__main__":
    stage_entry.run_stage(code)
