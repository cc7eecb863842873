"""``moecore.stages.robustness PHASE METHOD SEED``: scores a trained model under attack."""

from moecore.run import measurement_run, stage_entry
from moecore.study.run_and_claims import PhaseName


def robustness(phase: PhaseName, method: str, seed: int) -> None:
    measurement_run.measure_model("robustness", phase, method, seed)


if __name__ == "__main__":
    stage_entry.run_stage(robustness)
