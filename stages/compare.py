"""Set all methods side by side: one self-contained page, its numbers as JSON, its curves as CSV, the claims as Markdown.

    python -m stages.compare
"""

import os
from pathlib import Path

from pydantic import Field

from moecore.config import Config
from moecore.data.prepared import is_real
from moecore.files import whole_file, write_json
from moecore.params import read
from moecore.report.claims import Claim, flat_claims, judge
from moecore.report.curves import robustness_csv, table_s1_csv, training_csv
from moecore.report.page import page
from moecore.report.results import read_results, study_stages
from moecore.report.tables import data_facts, flat
from moecore.report.verdicts import claims_markdown
from moecore.selection import Selection
from moecore.stage import run_stage


class Params(Config):
    run: Selection
    claims: tuple[Claim, ...] = Field((), description="What the papers say of two methods; judged by these runs.")


def compare() -> None:
    params, path, folder = read(Params), Path(os.environ.get("MOECORE_PARAMS", "params.yaml")), Path("reports")
    results = read_results(params.run, path.read_text(encoding="utf-8"), stages=study_stages(path))
    judged = judge(params.claims, results)
    write_json(folder / "compare.json", flat(results) | data_facts(results) | ({"claims": flat_claims(judged)} if judged else {}))
    texts = {"index.html": page(results, judged), "claims.md": claims_markdown(judged), "plots/training.csv": training_csv(results)}
    if "robustness" in study_stages(path):
        texts["plots/robustness.csv"] = robustness_csv(results)
    if any(is_real(card) for card in results.cards.values()):
        texts["plots/table_s1.csv"] = table_s1_csv(results)
    for name, text in texts.items():
        with whole_file(folder / name) as target:
            target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_stage(compare)
