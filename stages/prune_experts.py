"""``moecore.stages.prune_experts METHOD SEED``: removes the worst experts of a trained model."""

from moecore.core.config import Config
from moecore.run import measurement_run, stage_entry
from moecore.study.params_reader import read_stage_params
from moecore.training.surgery.prune import Prune


class Params(Config):
    prune: Prune


def prune_experts(method: str, seed: int) -> None:
    params = read_stage_params(Params)
    measurement_run.run_expert_reduction(params, params.prune, method, seed)


if __name__ == "__main__":
    stage_entry.run_stage(prune_experts)
