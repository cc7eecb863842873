"""``moecore.stages.measure WHAT PHASE METHOD SEED``: measured, or why it does not apply."""

from moecore.run.measurement_run import measure_model
from moecore.run.stage_entry import run_stage
from moecore.study.sections import Phase


def measure(what: str, phase: Phase, method: str, seed: int) -> None:
    measure_model(what, phase, method, seed)


if __name__ == "__main__":
    run_stage(measure)
