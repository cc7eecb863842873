"""``moecore.stages.calculate WHAT``: computes a measurement that needs no trained model."""

from moecore.run.measurement_run import run_calculation
from moecore.run.stage_entry import run_stage


def calculate(what: str) -> None:
    run_calculation(what)


if __name__ == "__main__":
    run_stage(calculate)
