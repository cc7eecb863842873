"""Whether the seeds of a method find the same experts, from the choices that each model kept."""

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import numpy as np

from moecore.core.encoded_arrays import decode_compressed_text
from moecore.measure.expert_roles import KeptChoices, Result
from moecore.measure.routing_metrics.seed_matching import chance_agreement, seed_agreement
from moecore.report.page.view import Block, PageCell, PageTable, TableRow
from moecore.report.tables.number_format import NumberFormat
from moecore.report.typed_results import Phase
from moecore.statistics.intervals import Interval, mean_over_seed_pairs
from moecore.statistics.people import first_half

WORDS = (
    "The experts of two seeds are matched one to one on half of the images and compared on the "
    "others. Correlation: of which tokens chose an expert and its partner, mean over experts, "
    "layers and pairs of seeds; by chance with one seed's images exchanged. Shared choices: of one "
    "seed's experts those that the other chose too."
)


NUMBER = NumberFormat("number", 3)


class SeedStability(NamedTuple):
    """Means over layers and pairs of seeds, with jackknife intervals over seeds."""

    correlation: Interval
    overlap: Interval
    chance: float  # of the correlation
    seeds: int


def decode_choices(kept: KeptChoices) -> np.ndarray:
    """Return which experts tokens chose, (images, tokens, experts) bool."""
    bits = np.frombuffer(decode_compressed_text(kept.bits), np.uint8)
    return np.unpackbits(bits, count=int(np.prod(kept.shape))).astype(bool).reshape(kept.shape)


def seed_stability(phase: Phase, method: str) -> SeedStability | None:
    """Return how far a method's seeds agree; None where there are fewer than two results."""
    results = phase.of(Result).get(method, [])
    if len(results) < 2:
        return None
    models = [[decode_choices(layer.kept) for layer in result.layers] for result in results]
    people = results[0].layers[0].kept.people
    people = None if people is None else np.array(people)
    correlation, overlap = np.zeros((2, len(models), len(models)))
    chance = []
    for one, other in combinations(range(len(models)), 2):
        pairs = list(zip(models[one], models[other], strict=True))
        is_fit = first_half(len(pairs[0][0]), people)
        agreements = [seed_agreement(*layers, is_fit) for layers in pairs]
        correlation[one, other] = np.mean([agreement.correlation for agreement in agreements])
        overlap[one, other] = np.mean([agreement.overlap for agreement in agreements])
        nulls = [chance_agreement(*layers, is_fit, people=people) for layers in pairs]
        chance += [null.correlation for null in nulls]
    return SeedStability(
        mean_over_seed_pairs(correlation + correlation.T),
        mean_over_seed_pairs(overlap + overlap.T),
        float(np.mean(chance)),
        len(models),
    )


def stability_blocks(phase: Phase) -> Iterator[Block]:
    """Yield a table of the methods of which several seeds kept their choices."""
    lines = [
        TableRow(
            PageCell(method),
            [
                cell_with_limits(stability.correlation, NUMBER),
                PageCell(NUMBER.value(stability.chance)),
                cell_with_limits(stability.overlap, NumberFormat("share")),
            ],
        )
        for method in phase.models
        if (stability := seed_stability(phase, method))
    ]
    if lines:
        heads = ["Method", "Correlation", "By chance", "Shared choices"]
        yield Block("Do seeds find the same experts?", [WORDS], [PageTable(heads, lines)])


def cell_with_limits(interval: Interval, form: NumberFormat) -> PageCell:
    """Return a value with its limits below."""
    return PageCell(form.value(interval.value), form.limits(interval), value=interval.value)
