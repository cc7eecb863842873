"""Pictures of image–text models: experts of patches and words, and zero-shot accuracy."""

from collections.abc import Iterator

from moecore.measure import values, zero_shot
from moecore.measure.retrieval import Retrieval
from moecore.measure.routing_metrics.expert_profiles import Overlays
from moecore.report.figures.model_figures import draw_caption_experts
from moecore.report.page.page_objects import PageBlock, percent_table
from moecore.report.result_types import PhaseResults
from moecore.report.results_and_displays import Figures, Pictures, draw_pictures_by_name


def draw_images_and_words(result: values.Found) -> Figures:
    stored = result.facts.get("overlays")
    layers = result.facts["layers"]
    if stored is not None and (stored["grids"] or layers):
        experts = next((len(word_rows[0]["experts"]) for word_rows in layers), 0)
        overlays = Overlays.model_validate(stored)
        captions = result.facts["captions_read"]
        yield "images_and_words", draw_caption_experts(overlays, captions, experts)


def image_text_blocks(phase: PhaseResults) -> Iterator[PageBlock]:
    results = phase.first(Retrieval)
    grids = []
    for method, result in results.items():
        for number, word_rows in enumerate(result.facts["layers"], 1):
            title = f"{method}, layer {number}"
            shares = {word["word"]: word["experts"] for word in word_rows}
            experts = len(next(iter(shares.values()), ()))
            grid = percent_table("word", shares, [f"expert {number}" for number in range(experts)])
            below = "First expert of each occurrence of the most frequent words, in percent."
            grids.append(grid._replace(title=f"{title}{phase.seed_note}", below=below, short=title))
    first = next(iter(results.values()))
    images = f"{first.facts['images']:,} images"
    text = f"Gallery: {images}. A tie counts as the share of its orders that are hits."
    k = next(iter(first.curve("text_to_image", "k")))
    yield PageBlock("Images and captions", [text], grids, about=f"text_to_image_r{k}", choice=True)
    pictures = draw_pictures_by_name(phase, Retrieval, draw_images_and_words)["images_and_words"]
    yield PageBlock("Experts of patches and words", pictures=pictures)


def class_accuracy_blocks(phase: PhaseResults) -> Iterator[PageBlock]:
    facts = {method: result.facts for method, result in phase.first(zero_shot.ZeroShot).items()}
    first = next(iter(facts.values()))
    names = [row["name"] for row in first["classes"]]
    rows = {
        method: [
            row["correct"] / row["images"] if row["images"] else None
            for row in of_method["classes"]
        ]
        for method, of_method in facts.items()
    }
    below = f"Correct images, in percent; chance {100 * first['chance']:.0f}.{phase.seed_note}"
    unknown = [f"{row['name']} ({row['unknown']})" for row in first["classes"] if row["unknown"]]
    data, images, prompts = first["data"], first["images"], first["templates"]
    texts = [f"{data}, {images:,} images, {prompts} prompts per class."]
    if unknown:
        texts.append(f"Words that are not in the vocabulary, by class: {', '.join(unknown)}.")
    grid = percent_table("method", rows, names)._replace(title="Zero-shot, by class", below=below)
    yield PageBlock("Zero-shot", words=texts, grids=[grid], about="zero_shot_accuracy")


PICTURES = [
    Pictures("retrieval", draw_images_and_words, is_on_page=False, more=image_text_blocks),
    Pictures("zero_shot", more=class_accuracy_blocks),
]
