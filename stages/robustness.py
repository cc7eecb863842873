"""``python -m moecore.stages.robustness PHASE METHOD SEED``: scores under attacks, and an audit."""

from collections.abc import Sequence
from pathlib import Path

from moecore.core.config import Config
from moecore.data.prepared import Prepared
from moecore.measure.base import MeasuredModel
from moecore.measure.robustness import Robustness, check_attack_settings, measure
from moecore.measure.under_attack.curves import AuditLine
from moecore.run.progress import report_progress
from moecore.run.resume import record_measurement
from moecore.run.stage_entry import run_stage
from moecore.study.sections import Phase
from moecore.study.settings import read_params
from moecore.training.artifacts import load_model
from moecore.training.runtime import tune_runtime


class Params(Config):
    robustness: Robustness


def robustness(phase: Phase, method: str, seed: int) -> None:
    params = read_params(Params)
    settings = params.robustness
    data = Prepared.open(Path("artifacts/data") / phase)
    check_attack_settings(settings, data.task)
    with record_measurement("robustness", params, __file__, phase, method, seed) as (run, kept):
        device = tune_runtime(work=kept.folder).device
        model = load_model(Path("artifacts") / phase / method / str(seed)).to(device)
        with report_progress(f"robustness {phase} {method} seed {seed}", settings.parts) as bar:
            kept.show_progress(bar)
            result = measure(MeasuredModel(model, data), settings, kept.part)
        print_attack_audit(result.audit, f"Audit of the attacks on {phase} {method} seed {seed}")
        run.result(result)


def print_attack_audit(lines: Sequence[AuditLine], title: str) -> None:
    """Print the audit as a table on standard error."""
    from rich.console import Console
    from rich.table import Table

    table = Table("line", "holds", "what was found", title=title)
    for line in lines:
        table.add_row(line.name, {True: "yes", False: "NO", None: "–"}[line.holds], line.text)
    Console(stderr=True).print(table)


if __name__ == "__main__":
    run_stage(robustness)
