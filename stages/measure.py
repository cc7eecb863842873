"""``moecore.stages.measure WHAT PHASE METHOD SEED``: runs one measurement of a trained model."""

from moecore.run.measurement_run import measure_model
from moecore.run.stage_entry import run_stage
from moecore.study.run_and_claims import PhaseName


def measure(what: str, phase: PhaseName, method: str, seed: int) -> None:
    measure_model(what, phase, method, seed)


if __name__ == "__main__":
    run_stage(measure)
