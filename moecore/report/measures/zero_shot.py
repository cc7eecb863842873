"""How well prompts classify images that no caption was learned for (CLIP, §3.1)."""

from collections.abc import Iterator

from moecore.measure.zero_shot import Result
from moecore.report.column import Column, decode_items
from moecore.report.measures.result_display import Shown
from moecore.report.page.view import NONE, Block, PageCell, PageTable, TableRow
from moecore.report.typed_results import Phase

NOTE = "the class whose prompts lie nearest, of images that no caption was learned for"

COLUMNS = (
    Column(
        "zero_shot_accuracy",
        "Zero-shot accuracy",
        lambda result: result.accuracy,
        "higher",
        "share",
        NOTE,
        items=lambda result: decode_items(result.items),
        limits="wilson",
    ),
    Column(
        "zero_shot_top5",
        "Zero-shot Acc@5",
        lambda result: result.top5,
        "higher",
        "share",
        "the class is among the five nearest",
        limits="wilson",
        detail=True,
    ),
)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """The share of right images of each class, a row per method's first seed."""
    by_method = phase.first(Result)
    first = next(iter(by_method.values()))
    names = [row.name for row in first.rows]
    lines = [
        TableRow(PageCell(method), [_cell(row.correct, row.images) for row in result.rows])
        for method, result in by_method.items()
    ]
    below = f"Right images, in percent; chance {100 * first.chance:.0f}.{phase.first_seed}"
    unknown = [f"{row.name} ({row.unknown})" for row in first.rows if row.unknown]
    words = [f"{first.data}, {first.images:,} images, {first.templates} prompts a class."]
    if unknown:
        words.append(f"Words that the vocabulary does not have, by class: {', '.join(unknown)}.")
    grid = PageTable(
        ["method", *names], lines, title="Zero-shot, by class", below=below, small=True
    )
    yield Block("Zero-shot", words=words, grids=[grid], about="zero_shot_accuracy")


def _cell(correct: int, images: int) -> PageCell:
    if not images:
        return NONE
    share = correct / images
    return PageCell(f"{100 * share:.0f}", share=share, value=share)


SHOWN = Shown("zero_shot", "classes by prompts", Result, COLUMNS, part=phase_blocks, place=11)
