"""``moecore.stages.transfer PHASE SEED``: scores each model on images attacked on the others."""

import sys
from pathlib import Path
from typing import Annotated

from moecore.core import config, files
from moecore.data.prepared import Prepared
from moecore.measure.transfer_attacks import Transfer, measure
from moecore.run.run_record import printing_progress, record_resumable_run
from moecore.run.stage_entry import run_stage
from moecore.study import params_reader, run_and_claims
from moecore.training import artifacts, runtime


class Params(config.Config):
    methods: Annotated[tuple[str, ...], params_reader.ParamsKeyTemplate("run.methods")]
    transfer: Transfer = Transfer()


def transfer(phase: run_and_claims.PhaseName, seed: int) -> None:
    params = params_reader.read_stage_params(Params)
    folders = {name: Path("artifacts", phase, name, str(seed)) for name in params.methods}
    inputs = [Path("artifacts/data", phase), *folders.values()]
    with (
        record_resumable_run("transfer", params, inputs, phase=phase, seed=seed) as (run, work),
        printing_progress(f"transfer {phase} seed {seed}", len(folders) ** 2) as bar,
    ):
        parts = files.ResumableParts(work, run.inputs)
        data = Prepared.open(inputs[0])
        device = runtime.tune_runtime(work=work).device
        models = {name: artifacts.load_model(folder).to(device) for name, folder in folders.items()}
        parts.attach_progress_bar(bar)
        result = measure(models, data, params.transfer, parts.part)
        run.write_result(result)
        print(result.facts["reading"]["text"], file=sys.stderr)


if __name__ == "__main__":
    run_stage(transfer)
