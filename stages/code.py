"""Stage ``code``: hashes of the source files that decide results.

``python -m stages.code`` writes artifacts/code/, which the other stages depend on in the place of
the source, so they rerun exactly when a file or a part that they use is edited. As the first stage
it checks params.yaml, the data and the models too, before anything is computed. It must stay fast:
no torch, no pydantic where that was checked before.
"""

from moecore.pipeline.code_hashes import write_code
from moecore.run.inputs import params_path, refuse_changed_document
from moecore.run.stage import run_stage
from moecore.study.document import load


def code() -> None:
    document = load(params_path())
    write_code(document.path)
    refuse_changed_document(document)


if __name__ == "__main__":
    run_stage(code)
