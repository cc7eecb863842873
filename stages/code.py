"""Stage ``code``: hashes of the source files that decide results.

``python -m stages.code`` writes artifacts/code/, which the other stages depend on in the place of
the source, so they rerun exactly when a file or a part that they use is edited. As the first stage
it checks params.yaml, the data and the models too, before anything is computed.
"""

import os
from pathlib import Path

from moecore.pipeline.code_hashes import write_code
from moecore.run.stage import metrics_named, run_stage
from moecore.study.checking.preflight import check_study


def code() -> None:
    params = os.environ.get("MOECORE_PARAMS", "params.yaml")
    check_study(params, Path(), metrics_named)
    write_code(params)


if __name__ == "__main__":
    run_stage(code)
