"""What the papers' tables and figures show, joined with what the studies found of it.

Joins paper_tables.yaml with the claims and questions of pipelines/*/params.yaml and the numbers in
pipelines/*/reports/compare.json. Studies that were not run are said to be so.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from moecore.core.config import Config
from moecore.report.tables.cells import json_interval
from moecore.report.tables.comparison import read_comparison
from moecore.report.tables.number_format import NumberFormat
from moecore.study.reading.claims_section import Claim, Question, settings_digest
from moecore.study.reading.document import load_yaml
from moecore.study.reading.params import validate_keys
from moecore.study.reading.run_section import Selection

TABLES = Path(__file__).parents[1] / "paper_tables.yaml"
Status = Literal["judged", "printed", "drawn", "not run yet", "no study yet", "cannot", "scheme"]
STATES: dict[Status, str] = {
    "judged": "judged by a claim",
    "printed": "printed beside the paper's, without a claim",
    "drawn": "drawn on a study's page",
    "not run yet": "in a study that was not run yet with these claims",
    "no study yet": "in no study yet",
    "cannot": "cannot be printed here (see there)",
    "scheme": "a scheme or settings: nothing to print",
}


class Printed(Config):
    """Metrics of a study that stand beside a paper's number without being judged."""

    study: str
    phase: str
    methods: tuple[str, ...]
    metrics: tuple[str, ...]


class Row(Config):
    """One table, figure or sentence of a paper."""

    number: str
    shows: str
    paper: str = Field("", description="the paper's own numbers")
    sources: tuple[str, ...] = Field((), description="sources of claims; left out: the number")
    columns: tuple[Printed, ...] = ()
    drawn: tuple[str, ...] = Field((), description="studies whose page draws it")
    scheme: bool = False
    needs: str = Field("", description="why it cannot be printed here")


class Tables(Config):
    """The papers, as claims name them."""

    PRC: tuple[Row, ...]
    adversarial: tuple[Row, ...]
    ERMoE: tuple[Row, ...]
    TGR: tuple[Row, ...]
    MoGE: tuple[Row, ...]


class Asked(Config):
    """What of a study's params.yaml is judged."""

    run: Selection
    claims: tuple[Claim, ...] = ()
    questions: tuple[Question, ...] = ()


class Study(NamedTuple):
    """A study with what its last run found; ``compared`` is {} where it was not run."""

    name: str
    asked: Asked
    compared: Mapping[str, Any]
    settings: Mapping[str, Any]  # params.yaml as plain data


class Answer(NamedTuple):
    """A claim or question of a study, and its entry in compare.json, if any."""

    study: Study
    claim: Claim | Question
    entry: Mapping[str, Any] | None

    @property
    def changed(self) -> bool:
        """Whether settings were changed since."""
        known = None if self.entry is None else self.entry.get("settings")
        return known is not None and known != settings_digest(self.study.settings, self.claim)

    @property
    def verdict(self) -> str:
        """holds, equivalent, open, differs; "" where nothing was found."""
        if self.entry is None:
            return ""
        holds = self.entry["verdict"] == "holds" and self.claim.better == "equivalent"
        return "equivalent" if holds else self.entry["verdict"]


def read_paper_tables() -> Tables:
    """What paper_tables.yaml says; raises UserError where it is damaged."""
    return validate_keys(Tables, load_yaml(str(TABLES)))


def load_studies(root: Path) -> Iterator[Study]:
    """Every study under pipelines/, with its numbers where it was run."""
    for folder in sorted(path.parent for path in (root / "pipelines").glob("*/params.yaml")):
        path = folder / "reports/compare.json"
        compared = read_comparison(path) if path.exists() else {}
        document = load_yaml(str(folder / "params.yaml"))
        yield Study(folder.name, validate_keys(Asked, document), compared, document.data)


def answers_of(study: Study) -> list[Answer]:
    """Its claims and questions with their entries."""
    entries = {**study.compared.get("claims", {}), **study.compared.get("questions", {})}
    current = {
        json.dumps(entry["asked"], sort_keys=True): entry
        for entry in entries.values()
        if entry.keys() >= {"asked", "form"}  # others are of older versions
    }
    answers = []
    for claim in (*study.asked.claims, *study.asked.questions):
        asked = json.dumps(claim.model_dump(mode="json", exclude_none=True), sort_keys=True)
        answers.append(Answer(study, claim, current.get(asked)))
    return answers


def claims_in_row(row: Row, paper: str, answers: Sequence[Answer]) -> list[Answer]:
    """The claims that stand in this row."""
    sources = row.sources or (row.number,)
    return [
        one
        for one in answers
        if isinstance(one.claim, Claim)
        and (one.claim.paper, one.claim.source) in {(paper, source) for source in sources}
    ]


def row_status(row: Row, claims: Sequence[Answer], studies: Sequence[Study]) -> Status:
    """What is known of a row."""
    if row.scheme:
        return "scheme"
    if row.needs:
        return "cannot"
    if any(one.entry is not None for one in claims):
        return "judged"
    if any(values_of(printed, studies) for printed in row.columns):
        return "printed"
    run = {study.name for study in studies if study.compared}
    if run & set(row.drawn):
        return "drawn"
    return "not run yet" if claims or row.columns or row.drawn else "no study yet"


def values_of(printed: Printed, studies: Sequence[Study]) -> str:
    """``vmoe 55.0 %, prc 57.1 %`` of each metric that the study found; "" for none."""
    compared = next((one.compared for one in studies if one.name == printed.study), {})
    words = []
    for metric in printed.metrics:
        cells = {
            method: compared.get(method, {}).get(printed.phase, {}).get(metric)
            for method in printed.methods
        }
        having = {method: cell for method, cell in cells.items() if cell}
        if having:
            form = next(iter(having.values()))["form"]
            number_format = NumberFormat.of(form, map(json_interval, having.values()))
            values = [f"{name} {number_format.value(one['mean'])}" for name, one in having.items()]
            words.append(f"`{metric}`: {', '.join(values)}")
    return "; ".join(words)
