"""Tables of evaluated claims and questions, for the page and for claims.md."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moecore.report.claims import evaluation
from moecore.report.page.page_objects import PageBlock, PageCell, PageSection, PageTable, TableRow
from moecore.report.tables import cells
from moecore.study.run_and_claims import Claim

ANSWERS = {"holds": "yes", "differs": "no"}  # to a question
MARKS = {"holds": "✓ holds", "differs": "✗ differs here", "open": "? open", "": "–"}
HOW_CLAIMS_ARE_DECIDED = (
    "Difference: the claimed method minus the other, with its 95 % interval. Values are paired by "
    "seed and by item: a test image, or a person with several images. The line below a difference "
    "says what the interval is over. A claim of a direction holds if the interval lies on the "
    "claimed side of 0, differs here if it lies on the other side, and is open if it includes 0. A "
    "claim that two methods are equivalent within a margin holds if the 90 % interval lies within "
    "the margin (two one-sided tests at 5 %), and differs here if the 95 % interval lies wholly "
    "outside. A claim that a method is no worse holds if the one-sided 95 % limit lies within the "
    "margin. “With Holm”: the verdict with Holm's correction over the claims of the same paper in "
    "this study; docs/claims.md corrects over all studies. For an open claim the table has the "
    "smallest difference that this design detects with 80 % power at 5 %: (t(0.975) + t(0.8)) · "
    "standard error. It also says if the interval excludes the effect that the paper prints: a "
    "claim may hold, and be smaller or larger here. Data and model sizes differ from the papers'."
)
EFFECT_DECIMALS = {"share": 2}  # decimals of what a paper prints
CLAIMS_TITLE = "What the papers claim"
CLAIM_HEAD = ("Claim", "Verdict", "With Holm", "Difference", "Claimed", "Against", "Metric")
QUESTION_TITLE = "What no paper claims, asked of these runs"
QUESTION_HEAD = ("Question", "Answer", "Difference", "Of", "Against", "Metric")


class ClaimRow(NamedTuple):
    """The printed texts of one claim or question; a missing value is ""."""

    verdict: str  # holds, differs or open
    verdict_holm: str  # with Holm's correction
    values: tuple[str, str]  # of ``method`` and ``against``
    limits: tuple[str, str]  # of these values, without a unit
    difference: str
    difference_limits: str  # −0.6 to +1.7
    over: str  # what the interval is over, "items × seeds", or why there is no interval
    counts: str  # 3 seeds, 170 items
    detectable: str  # for an open verdict: the smallest detectable difference
    effect: str  # the difference that the paper prints
    excludes: str  # set if the interval excludes the effect that the paper prints

    def holm_note(self, verdict_texts: Mapping[str, str]) -> str:
        """Return "open with Holm's correction" if the correction changes the verdict, else ""."""
        if self.verdict_holm in ("", self.verdict):
            return ""
        return f"{verdict_texts.get(self.verdict_holm, self.verdict_holm)} with Holm's correction"


def build_claim_row(entry: Mapping[str, Any]) -> ClaimRow:
    ours = cells.interval_from_json(entry["method"])
    theirs = cells.interval_from_json(entry["against"])
    difference = entry["difference"]
    interval = cells.interval_from_json(difference)
    side_format = cells.NumberFormat.of(entry["form"], [ours, theirs])
    difference_format = cells.NumberFormat.of(entry["form"], [interval])
    over = "one seed, no interval"
    if difference["seeds"] > 1:
        over = "no interval: identical for all seeds"
    counts = f"{difference['seeds']} seeds"
    if difference.get("items"):
        over = "no interval: identical for all items"
        counts += f", {difference['items']:,} items"
    detectable = ""
    if entry["verdict"] == "open" and "smallest" in entry:
        detectable = f"detectable: {difference_format.magnitude(entry['smallest'])} at 80 % power"
    effect = excludes = ""
    if (printed := entry["asked"].get("effect")) is not None:
        effect_format = cells.NumberFormat(entry["form"], EFFECT_DECIMALS.get(entry["form"]))
        effect = effect_format.difference(printed)
        low, high = interval.limits or (printed, printed)
        if not low <= printed <= high:
            excludes = f"excludes the paper's {effect}"
    verdicts = (entry["verdict"], entry.get("verdict_holm", ""))
    values = (side_format.value(ours.value), side_format.value(theirs.value))
    limits = (side_format.limits(ours), side_format.limits(theirs))
    shown = difference_format.difference(interval.value)
    shown_limits = difference_format.difference_limits(interval)
    over = difference.get("interval", over)
    texts = (shown, shown_limits, over, counts, detectable, effect, excludes)
    return ClaimRow(*verdicts, values, limits, *texts)


def claims_section(evaluated: Sequence[evaluation.EvaluatedClaim]) -> PageSection:
    claims, questions = evaluation.split_claims_and_questions(evaluated)
    tables = (("", CLAIM_HEAD, claims), (QUESTION_TITLE, QUESTION_HEAD, questions))
    blocks = [
        PageBlock(title, grids=[PageTable(head, list(map(_claim_table_row, answers)))])
        for title, head, answers in tables
        if answers
    ]
    blocks.append(PageBlock("How this is decided", [HOW_CLAIMS_ARE_DECIDED], folded=True))
    return PageSection("claims", CLAIMS_TITLE if claims else QUESTION_TITLE, "Claims", blocks)


def claims_markdown(evaluated: Sequence[evaluation.EvaluatedClaim]) -> str:
    if not evaluated:
        return f"# {CLAIMS_TITLE}\n\nparams.yaml has no claims.\n"
    section = claims_section(evaluated)
    lines = [f"# {section.title}", "", HOW_CLAIMS_ARE_DECIDED]
    for block in section.blocks:
        if block.title and block.grids:
            lines += ["", f"## {block.title}"]
        for grid in block.grids:
            rows = [
                ["; ".join(filter(None, (part.text, part.small, part.note))) for part in parts]
                for parts in ((row.head, *row.items) for row in grid.lines)
            ]
            lines += ["", *cells.markdown_table(grid.columns, rows)]
    return "\n".join(lines).replace("\u00a0", " ") + "\n"


def _claim_table_row(evaluated_claim: evaluation.EvaluatedClaim) -> TableRow:
    claim = evaluated_claim.claim
    row = build_claim_row(evaluation.claim_to_json(evaluated_claim))
    detectable = keep_units_on_line(row.detectable)
    if isinstance(claim, Claim):
        head = PageCell(claim.paper, note=f"{claim.source}: {claim.says} “{claim.quote}”")
        excludes = keep_units_on_line(row.excludes)
        marks = [PageCell(MARKS[row.verdict], detectable, excludes, look=f"verdict {row.verdict}")]
        marks.append(PageCell(MARKS[row.verdict_holm], look=f"verdict {row.verdict_holm}"))
    else:
        head = PageCell(claim.paper or claim.asks, note=claim.asks if claim.paper else "")
        answer = ANSWERS.get(row.verdict, row.verdict)
        marks = [PageCell(answer, detectable, look=f"verdict {row.verdict}")]
    small = ", ".join(filter(None, (row.difference_limits, row.over)))
    better = claim.better
    if claim.margin is not None:
        margin = cells.NumberFormat(evaluated_claim.metric.form).magnitude(claim.margin)
        better = f"{better.replace('_', ' ')} within {margin}"
    verb = "claimed" if isinstance(claim, Claim) else "asked"
    other = claim.against_metric and f" against {claim.against_metric}"
    statement = f"{better} is {verb}{other}, {claim.phase}"
    note = "; ".join(filter(None, (statement, claim.why)))  # it may wrap
    metric = PageCell(evaluated_claim.metric.label, note=note)
    sides = map(PageCell, row.values, row.limits, (claim.method, claim.against))
    printed = row.effect and f"the paper: {row.effect}"
    difference = PageCell(row.difference, small, keep_units_on_line(printed))
    return TableRow(head, [*marks, difference, *sides, metric])


def keep_units_on_line(text: str) -> str:
    return cells.keep_percent_on_line(text.replace(" pp", "\u00a0pp"))
