"""Set all methods side by side: one self-contained page, its numbers as JSON, its curves as CSV.

    python -m stages.compare
"""

import os
from pathlib import Path

from moecore.config import Config
from moecore.files import whole_file, write_json
from moecore.params import read
from moecore.report.curves import robustness_csv, training_csv
from moecore.report.page import page
from moecore.report.results import read_results
from moecore.report.tables import flat
from moecore.stage import run_stage
from moecore.selection import Selection


class Params(Config):
    run: Selection


def compare() -> None:
    run = read(Params).run
    settings = Path(os.environ.get("MOECORE_PARAMS", "params.yaml")).read_text(encoding="utf-8")
    results, folder = read_results(run, settings), Path("reports")
    write_json(folder / "compare.json", flat(results))
    texts = {"index.html": page(results), "plots/training.csv": training_csv(results), "plots/robustness.csv": robustness_csv(results)}
    for name, text in texts.items():
        with whole_file(folder / name) as path:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_stage(compare)
