"""``moecore.stages.calculate WHAT``: a measurement that needs no trained model."""

from moecore.run.measurement_run import calculate_values
from moecore.run.stage_entry import run_stage


def calculate(what: str) -> None:
    calculate_values(what)


if __name__ == "__main__":
    run_stage(calculate)
