"""Whether the seeds of a method find the same experts, from the choices that each model kept."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np

from moecore.core.encoded_arrays import decode_compressed_text
from moecore.measure.routing_metrics.expert_roles import KeptChoices, Result
from moecore.measure.routing_metrics.seed_matching import chance_agreement, seed_agreement
from moecore.report.column import Column, ResultColumn
from moecore.report.page.rows import method_rows_table
from moecore.report.page.view import Block
from moecore.report.tables.cells import cell_over_seeds
from moecore.report.typed_results import Phase
from moecore.statistics.intervals import first_half

WORDS = (
    "The experts of two seeds are matched one to one on half of the images and compared on the "
    "others."
)


class PairAgreement(NamedTuple):
    """Of two seeds of a method: means over layers."""

    correlation: float
    overlap: float
    chance: float  # of the correlation


def decode_choices(kept: KeptChoices) -> np.ndarray:
    """Return which experts tokens chose, (images, tokens, experts) bool."""
    bits = np.frombuffer(decode_compressed_text(kept.bits), np.uint8)
    return np.unpackbits(bits, count=int(np.prod(kept.shape))).astype(bool).reshape(kept.shape)


def compare_seeds(ours: Result, theirs: Result) -> PairAgreement:
    """Return how far two seeds agree; the same two are compared once."""
    return compare_kept_choices(
        tuple(layer.kept for layer in ours.layers), tuple(layer.kept for layer in theirs.layers)
    )


@cache
def compare_kept_choices(
    ours: tuple[KeptChoices, ...], theirs: tuple[KeptChoices, ...]
) -> PairAgreement:
    """Return how far the layers of two models agree, on the same images."""
    people = None if ours[0].people is None else np.array(ours[0].people)
    is_fit = first_half(ours[0].shape[0], people)
    pairs = zip(ours, theirs, strict=True)
    layers = [(decode_choices(one), decode_choices(other)) for one, other in pairs]
    agreements = [seed_agreement(*layer, is_fit) for layer in layers]
    nulls = [chance_agreement(*layer, is_fit, people=people) for layer in layers]
    return PairAgreement(
        float(np.mean([one.correlation for one in agreements])),
        float(np.mean([one.overlap for one in agreements])),
        float(np.mean([one.correlation for one in nulls])),
    )


COLUMNS = (
    Column(
        "seed_stability",
        "Stability over seeds",
        lambda ours, theirs: compare_seeds(ours, theirs).correlation,
        note="correlation over tokens of who chose an expert of one seed and its partner of "
        "another, mean over experts, layers and pairs of seeds",
        of_pairs=True,
    ),
    Column(
        "seed_stability_chance",
        "Stability over seeds, by chance",
        lambda ours, theirs: compare_seeds(ours, theirs).chance,
        note="the same with one seed's images exchanged",
        detail=True,
        of_pairs=True,
    ),
    Column(
        "seed_overlap",
        "Choices that seeds share",
        lambda ours, theirs: compare_seeds(ours, theirs).overlap,
        form="share",
        note="of one seed's experts those that the other chose too, once matched",
        detail=True,
        of_pairs=True,
    ),
)


def stability_blocks(phase: Phase) -> Iterator[Block]:
    """Yield a table of the methods of which several seeds kept their choices."""
    metrics = [ResultColumn(column, Result) for column in COLUMNS]
    cells = {
        method: {metric.name: cell_over_seeds(metric, list(seeds.values())) for metric in metrics}
        for method, seeds in phase.models.items()
    }
    having = {method: row for method, row in cells.items() if all(row.values())}
    if having:
        table = method_rows_table(COLUMNS, having)
        title = "Do seeds find the same experts?"
        yield Block(title, [WORDS], [table], about="seed_stability")
