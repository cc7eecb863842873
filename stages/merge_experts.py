"""``moecore.stages.merge_experts METHOD SEED``: merges similar experts of a trained model."""

from moecore.core.config import Config
from moecore.run import measurement_run, stage_entry
from moecore.study.params_reader import read_stage_params
from moecore.training.surgery.merge import Merge


class Params(Config):
    merge: Merge


def merge_experts(method: str, seed: int) -> None:
    params = read_stage_params(Params)
    measurement_run.run_expert_reduction(params, params.merge, method, seed)


if __name__ == "__main__":
    stage_entry.run_stage(merge_experts)
