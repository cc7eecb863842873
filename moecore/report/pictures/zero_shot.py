"""How well prompts classify images of each class."""

from collections.abc import Iterator

from moecore.measure.zero_shot import ZeroShot
from moecore.report.page.view import NONE, Block, PageCell, PageTable, TableRow
from moecore.report.results import Pictures
from moecore.report.typed_results import Phase


def class_share_table(phase: Phase) -> Iterator[Block]:
    """The share of right images of each class, a row per method's first seed."""
    facts = {method: result.facts for method, result in phase.first(ZeroShot).items()}
    first = next(iter(facts.values()))
    names = [row["name"] for row in first["classes"]]
    lines = [
        TableRow(PageCell(method), [_cell(row["correct"], row["images"]) for row in of["classes"]])
        for method, of in facts.items()
    ]
    below = f"Right images, in percent; chance {100 * first['chance']:.0f}.{phase.first_seed}"
    unknown = [f"{row['name']} ({row['unknown']})" for row in first["classes"] if row["unknown"]]
    words = [f"{first['data']}, {first['images']:,} images, {first['templates']} prompts a class."]
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


PICTURES = Pictures("zero_shot", more=class_share_table)
