"""Models of the papers' sizes, built without memory and counted; no data and no training."""

from moecore.core.config import Config
from moecore.measure.sizes import Sizes, measure
from moecore.run.inputs import read_stage_inputs
from moecore.run.run_record import record_run
from moecore.run.stage_entry import run_stage
from moecore.study.settings import read_params


class Params(Config):
    sizes: Sizes


def sizes() -> None:
    params = read_params(Params)
    inputs = read_stage_inputs("sizes", params, __file__, [])
    with record_run("sizes", params, inputs=inputs) as run:
        run.result(measure(params.sizes))


if __name__ == "__main__":
    run_stage(sizes)
