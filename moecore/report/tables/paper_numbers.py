"""What the papers themselves report, of ../paper_numbers.yaml."""

from pathlib import Path
from typing import NamedTuple

import yaml

NUMBERS = Path(__file__).parents[1] / "paper_numbers.yaml"


class PaperModelNumbers(NamedTuple):
    """One model of one paper. ``values``: name of our metric → the paper's number."""

    paper: str
    model: str
    source: str
    values: dict[str, float]


_PAPERS = yaml.safe_load(NUMBERS.read_text(encoding="utf-8"))
PAPERS: dict[str, str] = {name: paper["title"] for name, paper in _PAPERS.items()}
SHORT: dict[str, str] = {name: paper["short"] for name, paper in _PAPERS.items()}
NOTES: dict[str, str] = {name: paper.get("note", "") for name, paper in _PAPERS.items()}
REPORTED = tuple(
    PaperModelNumbers(
        paper,
        model,
        table["source"],
        {
            metric: float(value)
            for metric, value in zip(table["metrics"], values, strict=True)
            if value is not None
        },
    )
    for paper, entries in _PAPERS.items()
    for table in entries.get("tables", ())
    for model, values in table["models"].items()
)


def paper_models_with_numbers(paper: str, shown: frozenset[str]) -> list[PaperModelNumbers]:
    """The models of one paper that have a number in one of the ``shown`` columns."""
    return [model for model in REPORTED if model.paper == paper and model.values.keys() & shown]
