"""``python -m moecore.stages.robustness PHASE METHOD SEED``: scores under attacks."""

from moecore.run.measurement_run import measure_model
from moecore.run.stage_entry import run_stage
from moecore.study.sections import Phase


def robustness(phase: Phase, method: str, seed: int) -> None:
    measure_model("robustness", phase, method, seed)


if __name__ == "__main__":
    run_stage(robustness)
