"""Theorems 1 and 2 of Puigcerver et al. (2022) on drawn data; no model."""

from moecore.core.config import Config
from moecore.measure.linear_experts import LinearExperts, measure
from moecore.run.inputs import read_stage_inputs
from moecore.run.run_record import record_run
from moecore.run.stage_entry import run_stage
from moecore.study.settings import read_params


class Params(Config):
    linear_experts: LinearExperts


def linear_experts() -> None:
    params = read_params(Params)
    inputs = read_stage_inputs("linear_experts", params, __file__, [])
    with record_run("linear_experts", params, inputs=inputs) as run:
        run.result(measure(params.linear_experts))


if __name__ == "__main__":
    run_stage(linear_experts)
