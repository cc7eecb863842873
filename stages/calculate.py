"""``moecore.stages.calculate WHAT``: computes a measurement that needs no trained model."""

from moecore.run import measurement_run, stage_entry


def calculate(what: str) -> None:
    measurement_run.run_calculation(what)


if __name__ == "__main__":
    stage_entry.run_stage(calculate)
