"""How often images and captions find each other (ERMoE, supplement §14), and experts of words."""

from collections.abc import Callable, Iterator

import numpy as np

from moecore.measure.base import Estimate
from moecore.measure.retrieval import Recall, Result, Retrieval, TextLayer
from moecore.report.column import Ahead, Column, Each, decode_items, mean_or_none
from moecore.report.figures.caption_sheets import read_images
from moecore.report.measured import Phase
from moecore.report.measures.shown import Figures, by_name
from moecore.report.page.view import Block, Grid, Item, Line

WAYS = {"text_to_image": "text → image", "image_to_text": "image → text"}
NOTES = {
    "text_to_image": "a caption's own image is among the first {}, among all test images; mean "
    "over an image's captions",
    "image_to_text": "any of an image's captions is among the first {}, among all captions",
}


def row_of(result: Result, way: str, k: str) -> Recall | None:
    """The row of this k; None where it was not measured."""
    return next((row for row in getattr(result, way) if row.k == int(k)), None)


def names_of(result: Result) -> list[str]:
    """1, 5, 10."""
    return [str(row.k) for row in result.text_to_image]


def ahead_of(way: str) -> Callable[[Ahead], list[str]]:
    """The names of the columns, of all the numbers that are asked for."""

    def names(ahead: Ahead) -> list[str]:
        settings = ahead.study.retrieval or Retrieval()
        return [f"{way}_r{k}" for k in settings.at]

    return names


def recall_at(way: str) -> Callable[[str, Result], Column]:
    """The column of one direction, for a k."""

    def made(k: str, result: Result) -> Column:
        def read(result: Result) -> Estimate | None:
            row = row_of(result, way, k)
            return None if row is None else row.recall

        def items(result: Result) -> np.ndarray | None:
            row = row_of(result, way, k)
            return None if row is None else decode_items(row.items)

        return Column(
            f"{way}_r{k}",
            f"{WAYS[way]} R@{k}",
            read,
            "higher",
            "share",
            NOTES[way].format(k),
            "ermoe",
            items=items,
        )

    return made


def of_layers(value: Callable[[TextLayer], float]) -> Callable[[Result], float | None]:
    """The mean over the text tower's MoE layers; None where it is dense."""
    return lambda result: mean_or_none([value(layer) for layer in result.layers])


COLUMNS = (
    *(Each(names_of, recall_at(way), ahead_of(way), "share") for way in WAYS),
    Column(
        "text_load_cv2",
        "Load CV², words",
        of_layers(lambda layer: layer.load_cv2),
        "lower",
        note="of the text tower's experts, over the words of all test captions",
    ),
    Column(
        "text_entropy",
        "Entropy, words",
        of_layers(lambda layer: layer.token_entropy),
        note="of the text tower's routing of a word, nats",
        detail=True,
    ),
    Column(
        "word_same_expert",
        "One word, one expert",
        of_layers(lambda layer: layer.same_expert),
        form="share",
        note="two occurrences of a word have one first expert",
    ),
    Column(
        "word_same_expert_chance",
        "One word, one expert: chance",
        of_layers(lambda layer: layer.same_expert_chance),
        form="share",
        note="the same of any two words",
        detail=True,
    ),
)


def figures(result: Result) -> Figures:
    """A few images beside their captions, where a tower has experts."""
    stored = result.overlays
    if stored is not None and (stored.grids or result.layers):
        experts = len(result.layers[0].words[0].experts) if result.layers else 0
        yield "images_and_words", read_images(stored, result.captions_read, experts)


def part(phase: Phase) -> Iterator[Block]:
    """The experts of the most frequent words, a table a method and layer."""
    grids = []
    for method, result in phase.first(Result).items():
        for number, layer in enumerate(result.layers, 1):
            title = f"{method}, layer {number}"
            grids.append(words_grid(layer, f"{title}{phase.first_seed}", title))
    gallery = next((f"{one.images:,} images" for one in phase.results(Result)), "")
    words = [f"Gallery: {gallery}. A tie counts for the share of its orders that hit."]
    about = next(
        (f"text_to_image_r{k}" for one in phase.results(Result) for k in names_of(one)), ""
    )
    yield Block(
        "Images and captions", words=words, grids=grids, folded=True, about=about, choice=True
    )
    pictures = by_name(phase, Result, figures)["images_and_words"]
    yield Block("Experts of patches and words", pictures=pictures, folded=True)


def words_grid(layer: TextLayer, title: str, short: str) -> Grid:
    """Words down, experts across, deeper where more of the word's occurrences go."""
    experts = range(len(layer.words[0].experts)) if layer.words else range(0)
    lines = [
        Line(
            Item(word.word, small=f"{word.count:,}"),
            [Item(f"{100 * share:.0f}", share=share, value=share) for share in word.experts],
        )
        for word in layer.words
    ]
    columns = ["word", *(f"expert {number}" for number in experts)]
    below = "First expert of each occurrence of the most frequent words, in percent."
    return Grid(columns, lines, title=title, below=below, small=True, short=short)
