"""What pipelines/<paper>/paper.yaml reports of models: shown next to ours, never compared."""

from typing import NamedTuple

import yaml

from moecore.core.source_layout import SHIPPED
from moecore.study import papers


class PaperModelNumbers(NamedTuple):
    """Numbers that a paper reports of one model. ``values``: name of our metric → number."""

    paper: str  # a key of PAPERS
    model: str
    source: str
    values: dict[str, float]
    printed_in: str = ""  # name of the paper, as in its claims


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_FILES = {
    name: yaml.load(papers.find_paper_file(SHIPPED, name).read_text(encoding="utf-8"), _LOADER)
    for name in papers.PAPERS
}
_OTHERS = {  # tables of a page that no single paper has
    "corruptions": {"title": "Common corruptions", "short": "Corruptions"},
    "cost": {
        "title": "Cost of a trained model (ERMoE, tables S2, S4, §12; MoGE, table 6)",
        "short": "Cost",
    },
    "ages": {
        "title": "ERMoE-ba: age from brain scans (supplement §5, table S1)",
        "short": "Brain age",
        "note": "ADNI holds scans of people; errors on other data, simulated ones above all, "
        "cannot be compared with the paper's in height.",
    },
}
_ALL = _FILES | _OTHERS
PAPERS: dict[str, str] = {name: paper["title"] for name, paper in _ALL.items()}
SHORT: dict[str, str] = {name: paper["short"] for name, paper in _ALL.items()}
NOTES: dict[str, str] = {name: paper.get("note", "") for name, paper in _ALL.items()}
REPORTED = tuple(
    PaperModelNumbers(
        table.get("page", paper),
        model,
        table["source"],
        {
            metric: float(value)
            for metric, value in zip(table["metrics"], values, strict=True)
            if value is not None
        },
        _FILES[paper]["name"],
    )
    for paper, entries in _FILES.items()
    for table in entries["numbers"]
    for model, values in table["models"].items()
)
COSTS = {model.model: model for model in REPORTED if model.paper == "cost"}
