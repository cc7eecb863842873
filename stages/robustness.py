"""``moecore.stages.robustness PHASE METHOD SEED``: scores a trained model under attack."""

from moecore.run.measurement_run import measure_model
from moecore.run.stage_entry import run_stage
from moecore.study.run_and_claims import PhaseName


def robustness(phase: PhaseName, method: str, seed: int) -> None:
    measure_model("robustness", phase, method, seed)


if __name__ == "__main__":
    run_stage(robustness)
