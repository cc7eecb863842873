"""How often 95 % intervals of a difference hold, over items and seeds: docs/intervals.md's table.

python -m benchmarks.coverage [--trials 4000] [--write docs/intervals.md]

Two methods are compared on n items with S seeds, again and again with other items and other seeds
whose true difference is known, and it is counted how often each interval covers it.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import expit, stdtrit

SEEDS = (3, 5, 10)
ITEMS = (100, 1000, 10_000)
RESAMPLES = 400  # of the bootstrap
VALUES = 4_000_000  # most values in memory at a time
BEGIN = "<!-- written by python -m benchmarks.coverage -->"
END = "<!-- end -->"
Draw = Callable[[np.random.Generator, int, int, int], np.ndarray]  # trials, seeds, items


class Case(NamedTuple):
    """A distribution of differences with known mean; ``draw`` returns (trials, S, n)."""

    words: str
    draw: Draw
    truth: float = 0.0


class Halves(NamedTuple):
    """Distances of the lower and upper limit from the mean, each (trials,)."""

    below: np.ndarray
    above: np.ndarray


def normal(seeds: float, items: float, both: float) -> Draw:
    """Return a draw of D = a_s + b_i + e_si; arguments: standard deviations of their means."""

    def draw(generator: np.random.Generator, trials: int, s: int, n: int) -> np.ndarray:
        of_seeds = generator.standard_normal((trials, s, 1)) * (seeds * np.sqrt(s))
        of_items = generator.standard_normal((trials, 1, n)) * (items * np.sqrt(n))
        rest = generator.standard_normal((trials, s, n)) * (both * np.sqrt(s * n))
        return rest + of_seeds + of_items

    return draw


def hits(spread: float, gap: float = 0.0) -> Draw:
    """Return a draw of the differences of two methods' hits (0 or 1) per item and seed.

    P(right) = σ(1.5 + difficulty_i + skill_ms + interaction_mi + scatter_msi): most items are right
    in both. spread: standard deviation of a method's skill over seeds; gap: difference of the
    methods' mean skills.
    """

    def draw(generator: np.random.Generator, trials: int, s: int, n: int) -> np.ndarray:
        difficulty = 2.0 * generator.standard_normal((trials, 1, n))
        found = []
        for sign in (0.5, -0.5):
            skill = sign * gap + spread * generator.standard_normal((trials, s, 1))
            own = 0.3 * generator.standard_normal((trials, 1, n))
            scatter = 0.8 * generator.standard_normal((trials, s, n))
            right = expit(1.5 + difficulty + skill + own + scatter)
            found.append(generator.random((trials, s, n)) < right)
        return found[0].astype(np.float64) - found[1]

    return draw


CASES = (
    Case("items dominate", normal(0.1, 1, 0.1)),
    Case("items and seeds alike", normal(1, 1, 0.1)),
    Case("seeds dominate", normal(1, 0.1, 0.1)),
    Case("seeds change nothing", normal(0, 1, 0)),
    Case("every value by itself", normal(0, 0, 1)),
    Case("all three alike", normal(1, 1, 1)),
    Case("right or wrong, steady seeds", hits(0.02)),
    Case("right or wrong, unsteady seeds", hits(0.3)),
)


class Parts(NamedTuple):
    """The variances from which intervals are computed, each (trials,)."""

    by_seeds: np.ndarray  # variance of the seed means / S
    by_items: np.ndarray  # variance of the item means / n
    seeds: int
    items: int


def parts(drawn: np.ndarray) -> Parts:
    """Return the variances of differences (trials, S, n)."""
    _, seeds, items = drawn.shape
    by_seeds = drawn.mean(axis=2).var(axis=1, ddof=1) / seeds
    by_items = drawn.mean(axis=1).var(axis=1, ddof=1) / items
    return Parts(by_seeds, by_items, seeds, items)


def make_symmetric_limits(half: np.ndarray) -> Halves:
    """Return symmetric limits."""
    return Halves(half, half)


def seeds_alone(drawn: np.ndarray, generator: np.random.Generator) -> Halves:
    """Student's t over seed means, which ignores the choice of items."""
    found = parts(drawn)
    return make_symmetric_limits(stdtrit(found.seeds - 1, 0.975) * np.sqrt(found.by_seeds))


def satterthwaite(drawn: np.ndarray, generator: np.random.Generator) -> Halves:
    """One t for both variances, with (A + B)²/(A²/(S − 1) + B²/(n − 1)) degrees of freedom."""
    found = parts(drawn)
    total = found.by_seeds + found.by_items
    squares = found.by_seeds**2 / (found.seeds - 1) + found.by_items**2 / (found.items - 1)
    freedom = np.maximum(total**2 / np.maximum(squares, 1e-300), 1.0)
    return make_symmetric_limits(stdtrit(freedom, 0.975) * np.sqrt(total))


def weighted(drawn: np.ndarray, generator: np.random.Generator) -> Halves:
    """A quantile of t per variance, as in moecore.statistics.comparisons."""
    found = parts(drawn)
    of_seeds = stdtrit(found.seeds - 1, 0.975) ** 2 * found.by_seeds
    of_items = stdtrit(found.items - 1, 0.975) ** 2 * found.by_items
    return make_symmetric_limits(np.sqrt(of_seeds + of_items))


def without_rest(drawn: np.ndarray, generator: np.random.Generator) -> Halves:
    """``weighted``, after subtracting the residual variance from the seeds' variance."""
    found = parts(drawn)
    rest = drawn - drawn.mean(axis=1, keepdims=True) - drawn.mean(axis=2, keepdims=True)
    rest += drawn.mean(axis=(1, 2), keepdims=True)
    scatter = np.square(rest).sum(axis=(1, 2)) / ((found.seeds - 1) * (found.items - 1))
    own = np.maximum(found.by_seeds - scatter / (found.seeds * found.items), 0)
    of_seeds = stdtrit(found.seeds - 1, 0.975) ** 2 * own
    return make_symmetric_limits(
        np.sqrt(of_seeds + stdtrit(found.items - 1, 0.975) ** 2 * found.by_items)
    )


def bootstrap(drawn: np.ndarray, generator: np.random.Generator) -> Halves:
    """The crossed ("pigeonhole") bootstrap, percentiles; the same draws for all trials at once."""
    _, seeds, items = drawn.shape
    of_seeds, of_items = (
        generator.multinomial(number, np.full(number, 1 / number), RESAMPLES) / number
        for number in (seeds, items)
    )
    means = np.einsum("rs,tsr->tr", of_seeds, drawn @ of_items.T, optimize=True)
    low, high = np.quantile(means, (0.025, 0.975), axis=1)
    value = drawn.mean(axis=(1, 2))
    return Halves(value - low, high - value)


INTERVALS: Mapping[str, Callable[[np.ndarray, np.random.Generator], Halves]] = {
    "seeds alone": seeds_alone,
    "Satterthwaite": satterthwaite,
    "a t each": weighted,
    "a t each, less scatter": without_rest,
    "crossed bootstrap": bootstrap,
}
CHOSEN = "a t each"


class Row(NamedTuple):
    """Coverage and width of all intervals in one setting."""

    case: Case
    seeds: int
    items: int
    covered: dict[str, float]  # interval → share of the trials whose interval holds the truth
    width: dict[str, float]  # interval → mean width / width of ±1.96 true standard errors


def simulate_coverage(case: Case, seeds: int, items: int, trials: int, seed: int = 0) -> Row:
    """Simulate ``trials`` comparisons; return coverage and width of every interval."""
    generator = np.random.default_rng([seed, seeds, items])
    size = max(1, VALUES // (seeds * items))
    means = []
    covered: dict[str, list[np.ndarray]] = {name: [] for name in INTERVALS}
    widths: dict[str, list[np.ndarray]] = {name: [] for name in INTERVALS}
    for start in range(0, trials, size):
        drawn = case.draw(generator, min(size, trials - start), seeds, items)
        value = drawn.mean(axis=(1, 2))
        means.append(value)
        for name, interval in INTERVALS.items():
            below, above = interval(drawn, generator)
            covered[name].append((value - below <= case.truth) & (case.truth <= value + above))
            widths[name].append(below + above)
    true = 2 * 1.959964 * float(np.concatenate(means).std())
    return Row(
        case,
        seeds,
        items,
        {name: float(np.concatenate(found).mean()) for name, found in covered.items()},
        {name: float(np.concatenate(found).mean()) / true for name, found in widths.items()},
    )


def rows(trials: int) -> Iterator[Row]:
    """Yield a row for every case, number of seeds and number of items."""
    for case in CASES:
        for seeds in SEEDS:
            for items in ITEMS:
                yield simulate_coverage(case, seeds, items, trials)


def table(found: list[Row]) -> str:
    """Return a Markdown table: a row per setting, ``coverage (width)`` per interval."""
    head = ("what varies", "seeds", "items", *INTERVALS)
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for row in found:
        cells = [f"{100 * row.covered[name]:.1f} ({row.width[name]:.2f})" for name in INTERVALS]
        lines.append([row.case.words, str(row.seeds), f"{row.items:,}", *cells])
    worst = [f"**{100 * min(row.covered[name] for row in found):.1f}**" for name in INTERVALS]
    lines.append(["**lowest coverage**", "", "", *worst])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=4000)
    parser.add_argument("--write", type=Path, help="put the table into this file")
    asked = parser.parse_args()
    found = table(list(rows(asked.trials)))
    print(found)
    if asked.write:
        text = asked.write.read_text(encoding="utf-8")
        start = text.index(BEGIN) + len(BEGIN)
        end = text.index(END)
        new = f"{text[:start]}\n\n{found}\n{text[end:]}"
        asked.write.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
