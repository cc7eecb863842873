"""How often images and captions find each other (ERMoE, supplement §14), and experts of words."""

from collections.abc import Callable, Iterator

from moecore.measure.retrieval import CaptionRoutingLayer, RecallAtK, Result, Retrieval
from moecore.report.column import Column, ColumnPerRow, PlannedPhase, decode_items, mean_or_none
from moecore.report.figures.expert_figures import image_and_caption_experts
from moecore.report.measures.result_display import Figures, Shown, pictures_by_name
from moecore.report.page.view import Block, PageCell, PageTable, TableRow
from moecore.report.typed_results import Phase

WAYS = {"text_to_image": "text → image", "image_to_text": "image → text"}
NOTES = {
    "text_to_image": "a caption's own image is among the first {}, among all test images; mean "
    "over an image's captions",
    "image_to_text": "any of an image's captions is among the first {}, among all captions",
}


def recall_columns(way: str) -> ColumnPerRow:

    def rows(result: Result) -> dict[str, RecallAtK]:
        return {str(row.k): row for row in getattr(result, way)}

    def planned_numbers(ahead: PlannedPhase) -> list[str]:
        settings = ahead.study.retrieval or Retrieval()
        return [str(k) for k in settings.at]

    column = Column(
        f"{way}_r{{}}",
        f"{WAYS[way]} R@{{}}",
        lambda row: row.recall,
        "higher",
        "share",
        NOTES[way],
        "ermoe",
        items=lambda row: decode_items(row.items),
    )
    return ColumnPerRow(rows, column, planned_numbers)


def text_layer_mean_reader(
    value: Callable[[CaptionRoutingLayer], float],
) -> Callable[[Result], float | None]:
    """The mean over the text tower's MoE layers; None where it is dense."""
    return lambda result: mean_or_none([value(layer) for layer in result.layers])


COLUMNS = (
    *map(recall_columns, WAYS),
    Column(
        "text_load_cv2",
        "Load CV², words",
        text_layer_mean_reader(lambda layer: layer.load_cv2),
        "lower",
        note="of the text tower's experts, over the words of all test captions",
    ),
    Column(
        "text_entropy",
        "Entropy, words",
        text_layer_mean_reader(lambda layer: layer.token_entropy),
        note="of the text tower's routing of a word, nats",
        detail=True,
    ),
    Column(
        "word_same_expert",
        "One word, one expert",
        text_layer_mean_reader(lambda layer: layer.same_expert),
        form="share",
        note="two occurrences of a word have one first expert",
    ),
    Column(
        "word_same_expert_chance",
        "One word, one expert: chance",
        text_layer_mean_reader(lambda layer: layer.same_expert_chance),
        form="share",
        note="the same of any two words",
        detail=True,
    ),
)


def figures(result: Result) -> Figures:
    """A few images beside their captions, where a tower has experts."""
    stored = result.overlays
    if stored is not None and (stored.grids or result.layers):
        experts = next((len(layer.words[0].experts) for layer in result.layers), 0)
        yield "images_and_words", image_and_caption_experts(stored, result.captions_read, experts)


def phase_blocks(phase: Phase) -> Iterator[Block]:
    """The experts of the most frequent words, a table a method and layer."""
    grids = []
    for method, result in phase.first(Result).items():
        for number, layer in enumerate(result.layers, 1):
            title = f"{method}, layer {number}"
            grids.append(word_expert_table(layer, f"{title}{phase.first_seed}", title))
    first = phase.results(Result)[0]
    words = [
        f"Gallery: {first.images:,} images. A tie counts for the share of its orders that hit."
    ]
    about = f"text_to_image_r{first.text_to_image[0].k}"
    title = "Images and captions"
    yield Block(title, words, grids, about=about, choice=True)
    pictures = pictures_by_name(phase, Result, figures)["images_and_words"]
    yield Block("Experts of patches and words", pictures=pictures)


def word_expert_table(layer: CaptionRoutingLayer, title: str, short: str) -> PageTable:
    """Words down, experts across, deeper where more of the word's occurrences go."""
    experts = [number for word in layer.words[:1] for number, _ in enumerate(word.experts)]
    lines = [
        TableRow(
            PageCell(word.word, small=f"{word.count:,}"),
            [PageCell(f"{100 * share:.0f}", share=share, value=share) for share in word.experts],
        )
        for word in layer.words
    ]
    columns = ["word", *(f"expert {number}" for number in experts)]
    below = "First expert of each occurrence of the most frequent words, in percent."
    return PageTable(columns, lines, title=title, below=below, small=True, short=short)


SHOWN = Shown("retrieval", "images and captions", Result, COLUMNS, figures, phase_blocks, place=10)
