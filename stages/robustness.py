"""``python -m moecore.stages.robustness PHASE METHOD SEED``: scores under attacks, and an audit."""

from collections.abc import Mapping, Sequence
from typing import Any

from moecore.run.measurement_run import measure_model
from moecore.run.stage_entry import run_stage
from moecore.study.sections import Phase


def robustness(phase: Phase, method: str, seed: int) -> None:
    result = measure_model("robustness", phase, method, seed)
    title = f"Audit of the attacks on {phase} {method} seed {seed}"
    print_attack_audit(result.facts["audit"], title)


def print_attack_audit(lines: Sequence[Mapping[str, Any]], title: str) -> None:
    """Print the audit's lines (``AuditLine``) as a table on standard error."""
    from rich.console import Console
    from rich.table import Table

    table = Table("line", "holds", "what was found", title=title)
    for line in lines:
        verdict = {True: "yes", False: "NO", None: "–"}[line["holds"]]
        table.add_row(line["name"], verdict, line["text"])
    Console(stderr=True).print(table)


if __name__ == "__main__":
    run_stage(robustness)
