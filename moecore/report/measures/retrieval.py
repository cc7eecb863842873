"""How often images and captions find each other (ERMoE, supplement §14), and experts of words."""

from collections.abc import Callable, Iterator

from moecore.measure.retrieval import Recall, Result, Retrieval, TextLayer
from moecore.report.column import Ahead, Column, Each, decode_items, mean_or_none
from moecore.report.figures.expert_maps import read_images
from moecore.report.measured import Phase
from moecore.report.measures.shown import Figures, Shown, by_name
from moecore.report.page.view import Block, Grid, Item, Line

WAYS = {"text_to_image": "text → image", "image_to_text": "image → text"}
NOTES = {
    "text_to_image": "a caption's own image is among the first {}, among all test images; mean "
    "over an image's captions",
    "image_to_text": "any of an image's captions is among the first {}, among all captions",
}


def recall_at(way: str) -> Each:

    def rows(result: Result) -> dict[str, Recall]:
        return {str(row.k): row for row in getattr(result, way)}

    def numbers_ahead(ahead: Ahead) -> list[str]:
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
    return Each(rows, column, numbers_ahead)


def of_layers(value: Callable[[TextLayer], float]) -> Callable[[Result], float | None]:
    """The mean over the text tower's MoE layers; None where it is dense."""
    return lambda result: mean_or_none([value(layer) for layer in result.layers])


COLUMNS = (
    *map(recall_at, WAYS),
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
        experts = next((len(layer.words[0].experts) for layer in result.layers), 0)
        yield "images_and_words", read_images(stored, result.captions_read, experts)


def part(phase: Phase) -> Iterator[Block]:
    """The experts of the most frequent words, a table a method and layer."""
    grids = []
    for method, result in phase.first(Result).items():
        for number, layer in enumerate(result.layers, 1):
            title = f"{method}, layer {number}"
            grids.append(words_grid(layer, f"{title}{phase.first_seed}", title))
    first = phase.results(Result)[0]
    words = [
        f"Gallery: {first.images:,} images. A tie counts for the share of its orders that hit."
    ]
    about = f"text_to_image_r{first.text_to_image[0].k}"
    title = "Images and captions"
    yield Block(title, words, grids, about=about, choice=True)
    pictures = by_name(phase, Result, figures)["images_and_words"]
    yield Block("Experts of patches and words", pictures=pictures)


def words_grid(layer: TextLayer, title: str, short: str) -> Grid:
    """Words down, experts across, deeper where more of the word's occurrences go."""
    experts = [number for word in layer.words[:1] for number, _ in enumerate(word.experts)]
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


SHOWN = Shown("retrieval", "images and captions", Result, COLUMNS, figures, part)
