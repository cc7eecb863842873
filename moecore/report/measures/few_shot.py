"""How well frozen features tell classes from a few images each (V-MoE's evaluator; ERMoE)."""

from collections.abc import Iterator

from moecore.measure.few_shot import FewShot, Result, ShotsRow
from moecore.report.column import Column, ColumnPerRow, PlannedPhase, decode_items
from moecore.report.figures.charts import ChartSpec
from moecore.report.measures.result_display import Shown, draw_method_curves
from moecore.report.page.view import Block
from moecore.report.typed_results import Phase
from moecore.statistics.intervals import Interval

NOTE = (
    "ridge on frozen features, {} images per class, V-MoE's protocol; mean and interval over draws "
    "of the images; penalty chosen by leaving one out (ERMoE's main paper reports 5-shot)"
)
LEAKY = "the same with the penalty that is best on the test images themselves: too good"


def rows_by_shots(result: Result) -> dict[str, ShotsRow]:
    """The numbers of images per class, without those that the smallest class does not have."""
    return {str(row.shots): row for row in result.rows}


def planned_shots(ahead: PlannedPhase) -> list[str]:
    settings = ahead.study.few_shot or FewShot()
    return [str(one) for one in settings.shots]


COLUMNS = (
    ColumnPerRow(
        rows_by_shots,
        Column(
            "few_shot_{}",
            "{}-shot accuracy",
            lambda row: Interval(row.score, row.low, row.high),
            "higher",
            "share",
            NOTE,
            "ermoe",
            items=lambda row: decode_items(row.items),
            limits="draws",
        ),
        planned_shots,
    ),
    ColumnPerRow(
        rows_by_shots,
        Column(
            "few_shot_{}_leaky",
            "{}-shot accuracy, penalty chosen on test (leaky)",
            lambda row: Interval(row.leaky_score, row.leaky_low, row.leaky_high),
            "",
            "share",
            LEAKY,
            "ermoe",
            limits="draws",
            detail=True,
        ),
        planned_shots,
    ),
)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """The score over the number of images per class, a line per method; what was left out."""
    results = phase.results(Result)
    reasons = {f"{one.shots} shots: {one.why}." for result in results for one in result.skipped}
    look = ChartSpec(
        "Accuracy from a few images", "Images per class", "Accuracy", share=True, top=1.02
    )
    drawn = draw_method_curves(
        phase,
        Result,
        lambda result: {row.shots: row.score for row in result.rows},
        look,
        "Ridge on frozen features, mean over draws.",
        "few shots",
        (0.0, 1.0),
    )
    most = max((row.shots for result in results for row in result.rows), default=0)
    about = f"few_shot_{most}"
    yield Block("Few shots", pictures=drawn, below=sorted(reasons), about=about)


SHOWN = Shown("few_shot", "few shots", Result, COLUMNS, part=phase_blocks, place=12)
