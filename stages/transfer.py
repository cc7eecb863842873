"""``moecore.stages.transfer PHASE SEED``: scores each model on images attacked on the others."""

import sys
from pathlib import Path
from typing import Annotated

from moecore.core.config import Config
from moecore.core.files import ResumableParts
from moecore.data.prepared import Prepared
from moecore.measure.transfer_attacks import Transfer, measure
from moecore.run.run_record import record_resumable, report_progress
from moecore.run.stage_entry import run_stage
from moecore.study.params_reader import ParamsKeyTemplate, read_params
from moecore.study.run_and_claims import PhaseName
from moecore.training.artifacts import load_model
from moecore.training.runtime import tune_runtime


class Params(Config):
    methods: Annotated[tuple[str, ...], ParamsKeyTemplate("run.methods")]
    transfer: Transfer = Transfer()


def transfer(phase: PhaseName, seed: int) -> None:
    params = read_params(Params)
    folders = {name: Path("artifacts", phase, name, str(seed)) for name in params.methods}
    inputs = [Path("artifacts/data", phase), *folders.values()]
    with (
        record_resumable("transfer", params, inputs, phase=phase, seed=seed) as (run, work),
        report_progress(f"transfer {phase} seed {seed}", len(folders) ** 2) as bar,
    ):
        parts = ResumableParts(work, run.inputs)
        data = Prepared.open(inputs[0])
        device = tune_runtime(work=work).device
        models = {name: load_model(folder).to(device) for name, folder in folders.items()}
        parts.attach_progress_bar(bar)
        result = measure(models, data, params.transfer, parts.part)
        run.result(result)
        print(result.facts["reading"]["text"], file=sys.stderr)


if __name__ == "__main__":
    run_stage(transfer)
