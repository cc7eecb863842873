"""``moecore.stages.measure WHAT PHASE METHOD SEED``: runs one measurement of a trained model."""

from moecore.run import measurement_run, stage_entry
from moecore.study.run_and_claims import PhaseName


def measure(what: str, phase: PhaseName, method: str, seed: int) -> None:
    measurement_run.measure_model(what, phase, method, seed)


if __name__ == "__main__":
    stage_entry.run_stage(measure)
