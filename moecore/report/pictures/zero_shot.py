"""Zero-shot accuracy of each class."""

from collections.abc import Iterator

from moecore.measure.zero_shot import ZeroShot
from moecore.report.page.page_objects import Block, percent_grid
from moecore.report.results import Pictures
from moecore.report.study_results import Phase


def class_share_table(phase: Phase) -> Iterator[Block]:
    """Yield a block with the share of correct images per class, a row per method (first seed)."""
    facts = {method: result.facts for method, result in phase.first(ZeroShot).items()}
    first = next(iter(facts.values()))
    names = [row["name"] for row in first["classes"]]
    rows = {
        method: [
            row["correct"] / row["images"] if row["images"] else None
            for row in of_method["classes"]
        ]
        for method, of_method in facts.items()
    }
    below = f"Correct images, in percent; chance {100 * first['chance']:.0f}.{phase.first_seed}"
    unknown = [f"{row['name']} ({row['unknown']})" for row in first["classes"] if row["unknown"]]
    data, images, prompts = first["data"], first["images"], first["templates"]
    texts = [f"{data}, {images:,} images, {prompts} prompts per class."]
    if unknown:
        texts.append(f"Words that are not in the vocabulary, by class: {', '.join(unknown)}.")
    grid = percent_grid("method", rows, names)._replace(title="Zero-shot, by class", below=below)
    yield Block("Zero-shot", words=texts, grids=[grid], about="zero_shot_accuracy")


PICTURES = Pictures("zero_shot", more=class_share_table)
