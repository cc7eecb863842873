"""Zero-shot accuracy of each class."""

from collections.abc import Iterator

from moecore.measure.zero_shot import ZeroShot
from moecore.report.page.page_objects import NONE, Block, PageCell, PageTable, TableRow
from moecore.report.results import Pictures
from moecore.report.study_results import Phase


def class_share_table(phase: Phase) -> Iterator[Block]:
    """Yield a block with the share of correct images per class, a row per method (first seed)."""
    facts = {method: result.facts for method, result in phase.first(ZeroShot).items()}
    first = next(iter(facts.values()))
    names = [row["name"] for row in first["classes"]]
    lines = []
    for method, of_method in facts.items():
        classes = of_method["classes"]
        shares = [row["correct"] / row["images"] if row["images"] else None for row in classes]
        cells = [
            NONE if share is None else PageCell(f"{100 * share:.0f}", share=share, value=share)
            for share in shares
        ]
        lines.append(TableRow(PageCell(method), cells))
    below = f"Correct images, in percent; chance {100 * first['chance']:.0f}.{phase.first_seed}"
    unknown = [f"{row['name']} ({row['unknown']})" for row in first["classes"] if row["unknown"]]
    data, images, prompts = first["data"], first["images"], first["templates"]
    texts = [f"{data}, {images:,} images, {prompts} prompts per class."]
    if unknown:
        texts.append(f"Words that are not in the vocabulary, by class: {', '.join(unknown)}.")
    columns = ["method", *names]
    title = "Zero-shot, by class"
    grid = PageTable(columns, lines, title=title, below=below, small=True)
    yield Block("Zero-shot", words=texts, grids=[grid], about="zero_shot_accuracy")


PICTURES = Pictures("zero_shot", more=class_share_table)
