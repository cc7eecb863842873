"""The papers and their claims, as ``pipelines/<paper>/paper.yaml`` describes each of them once.

``tables`` are the paper's tables, figures and sentences: their content, and the tested claims by
name. ``numbers`` are the results of the paper's models, in the units of our metrics. A question
lists the claims that it answers:

    asks:
      - tgr/8_experts                                     # of pipelines/tgr/paper.yaml
      - {claim: moge/momentum, against: momentum_slow}    # with a changed key

The composed params.yaml has them in full, as ``claims``. A project without a paper's file uses the
file of the installed version.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from moecore.core.config import Config
from moecore.core.source_layout import SHIPPED
from moecore.study.params_reader import validate_document
from moecore.study.yaml_document import YamlDocument, did_you_mean, parse_yaml_document, show_value

PIPELINES = Path("pipelines")
PAPER_FILE = "paper.yaml"
PAPER_FOLDERS = ("prc", "ermoe", "tgr", "moge", "adversarial")  # in the order of a page's tables
ASKS = "asks"  # of a question: the claims that it answers
CLAIM_NAME_KEY = "claim"  # of an entry of asks: the claim's name


class PrintedUntestedMetrics(Config):
    """Metrics without a claim, shown next to a paper's; ``levels`` adds a test of a linear rise."""

    study: str
    phase: str
    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    levels: tuple[float, ...] = Field((), description="of methods: the rise is tested as linear")


class CalculationRatio(Config):
    """The ratio of two calculated values (``places``), shown with the paper's (``printed``)."""

    study: str
    places: tuple[str, str] = Field(description="such as two models")
    printed: tuple[str, str] = Field(description="models of ``numbers`` that they are beside")
    metrics: tuple[str, ...]


class WithdrawnClaim(Config):
    """A claim that is no longer evaluated, with its last result."""

    says: str
    found: str = Field(description="its last verdict and numbers")
    why: str


class PaperTable(Config):
    """One table, figure or sentence of a paper."""

    number: str = Field(description="place in the paper: the `source` of its claims")
    shows: str
    paper: str = Field("", description="the paper's own numbers")
    claims: dict[str, dict[str, Any]] = Field({}, description="claims by name")
    withdrawn: tuple[WithdrawnClaim, ...] = Field((), description="claims of earlier versions")
    columns: tuple[PrintedUntestedMetrics, ...] = Field((), description="metrics without a claim")
    computed: tuple[CalculationRatio, ...] = Field((), description="numbers of calculations")
    drawn: tuple[str, ...] = Field((), description="studies whose page draws it")
    scheme: bool = Field(False, description="a sketch, an algorithm or settings: no result")
    needs: str = Field("", description="why it cannot be printed here")


class ModelNumbers(Config):
    """The numbers that a paper prints for its models, in units of our metrics (shares: 0 to 1)."""

    source: str = Field(description="the paper's table, and its data")
    page: str = Field("", description="the page's table that has them, if not the paper's own")
    metrics: tuple[str, ...] = Field(description="names of our metrics")
    models: dict[str, tuple[float | None, ...]] = Field(
        description="the paper's numbers in that order; null: it prints none"
    )


class Paper(Config):
    name: str = Field(description="the paper's name in claims")
    title: str
    short: str
    note: str = Field("", description="printed below its table on a page")
    tables: tuple[PaperTable, ...] = ()
    numbers: tuple[ModelNumbers, ...] = ()


class NamedClaim(NamedTuple):
    keys: tuple[str | int, ...]  # its place in the paper's file
    values: dict[str, Any]  # as of a claim in a params.yaml, with paper and source


def named_claims(paper: Mapping[str, Any]) -> dict[str, NamedClaim]:
    """Return name → claim, with its paper and source; paper: a paper.yaml, parsed."""
    return {
        name: NamedClaim(
            ("tables", index, "claims", name),
            {"paper": paper["name"], "source": table["number"]} | claim,
        )
        for index, table in enumerate(paper.get("tables") or ())
        for name, claim in (table.get("claims") or {}).items()
    }


def find_paper_file(root: Path, folder: str) -> Path:
    path = PIPELINES / folder / PAPER_FILE
    return root / path if (root / path).is_file() else SHIPPED / path


def list_papers(root: Path) -> list[str]:
    added = sorted(path.parent.name for path in (root / PIPELINES).glob(f"*/{PAPER_FILE}"))
    return list(dict.fromkeys((*PAPER_FOLDERS, *added)))


def load_papers(root: Path) -> dict[str, Paper]:
    files = {name: find_paper_file(root, name) for name in list_papers(root)}
    return {name: validate_document(Paper, _load(file)) for name, file in files.items()}


def load_named_claims(root: Path) -> dict[str, dict[str, Any]]:
    return {
        f"{folder}/{name}": claim.values
        for folder in list_papers(root)
        for name, claim in named_claims(_load(find_paper_file(root, folder)).data).items()
    }


def parse_asked_claim(entry: Any) -> tuple[str, str, dict[str, Any]]:
    """Split an entry of ``asks`` (claims to answer): paper's folder, claim's name, changed keys."""
    changes = dict(entry) if isinstance(entry, dict) else {CLAIM_NAME_KEY: entry}
    folder, _, name = str(changes.pop(CLAIM_NAME_KEY, "")).partition("/")
    return folder, name, changes


def resolve_asked_claims(
    document: YamlDocument, root: Path
) -> tuple[list[dict[str, Any]], dict[tuple, tuple[YamlDocument, tuple]]]:
    """Return the claims in ``asks``, and each key of them → its source (document, keys in it)."""
    asks = document.data[ASKS]
    if not isinstance(asks, list):
        text = f"found {show_value(asks)}; allowed: a list of claims, paper/name"
        raise document.error((ASKS,), text)
    claims = []
    places = {}
    folders = list_papers(root)
    for index, entry in enumerate(asks):
        folder, name, changes = parse_asked_claim(entry)
        paper = _load(find_paper_file(root, folder)) if folder in folders else None
        named = {} if paper is None else named_claims(paper.data)
        if paper is None or name not in named:
            names = [f"{folder}/{other}" for other in named] or [f"{other}/" for other in folders]
            asked_name = f"{folder}/{name}" if name else folder
            hint = did_you_mean(asked_name, names)
            text = f"found {show_value(asked_name)}{hint}; allowed: {', '.join(names)}"
            raise document.error((ASKS, index), text)
        claim, start = named[name], ("claims", index)
        unchanged = [key for key in claim.values if key not in changes]
        places |= {(*start, key): (paper, (*claim.keys, key)) for key in unchanged}
        places[start] = (document, (ASKS, index))
        claims.append(claim.values | changes)
    return claims, places


def _load(path: Path) -> YamlDocument:
    return _parse_paper_document(path.read_text(encoding="utf-8"), str(path))


@lru_cache(maxsize=16)  # all questions name the same few
def _parse_paper_document(text: str, path: str) -> YamlDocument:
    document = parse_yaml_document(text, path)
    validate_document(Paper, document)
    return document
