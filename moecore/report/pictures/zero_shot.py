"""Zero-shot accuracy of each class."""

from collections.abc import Iterator

from moecore.measure.zero_shot import ZeroShot
from moecore.report.page.view import NONE, Block, PageCell, PageTable, TableRow
from moecore.report.results import Pictures
from moecore.report.study_results import Phase


def class_share_table(phase: Phase) -> Iterator[Block]:
    """Yield the share of correct images per class, a row per method's first seed."""
    facts = {method: result.facts for method, result in phase.first(ZeroShot).items()}
    first = next(iter(facts.values()))
    names = [row["name"] for row in first["classes"]]
    lines = [
        TableRow(PageCell(method), [_cell(row["correct"], row["images"]) for row in of["classes"]])
        for method, of in facts.items()
    ]
    below = f"Correct images, in percent; chance {100 * first['chance']:.0f}.{phase.first_seed}"
    unknown = [f"{row['name']} ({row['unknown']})" for row in first["classes"] if row["unknown"]]
    data, images, prompts = first["data"], first["images"], first["templates"]
    texts = [f"{data}, {images:,} images, {prompts} prompts per class."]
    if unknown:
        texts.append(f"Words that are not in the vocabulary, by class: {', '.join(unknown)}.")
    grid = PageTable(
        ["method", *names], lines, title="Zero-shot, by class", below=below, small=True
    )
    yield Block("Zero-shot", words=texts, grids=[grid], about="zero_shot_accuracy")


def _cell(correct: int, images: int) -> PageCell:
    if not images:
        return NONE
    share = correct / images
    return PageCell(f"{100 * share:.0f}", share=share, value=share)


PICTURES = Pictures("zero_shot", more=class_share_table)
