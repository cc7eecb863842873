"""How often a claim that is not true holds: answered once, or asked again until it holds.

python -m benchmarks.looks [--trials 100000] [--seed 0] [--write docs/intervals.md]

The true difference is 0 and varies over seeds alone. Each claim of pipelines/ is answered as often
as it was, with as many seeds each time, all new, until it holds. The first table has the share that
holds in the end, in %, in the claimed direction and without Holm's correction, by the rule:

- last alone: by the last answer, as if it were the only one.
- pooled: by Student's t over the seeds of all answers so far, as if they were one.
- corrected: by the combination of all answers, with p × 2ᵏ for k answers, the first one too.
- from the second: the same, but the first answer is judged as if no other would follow.

The second table has, for runs that were all planned, the share of pooled estimates whose 95 %
interval excludes 0 on the claimed side, by the weights of the runs.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from moecore.report.tables.cells import markdown_table
from moecore.statistics.comparisons import OVER_SEEDS, Difference, SourceVariance
from moecore.study.questions import load_rounds
from tools.designs import combined_p, correct_for_looks, pool_differences
from tools.pooled_claims import evaluate_pooled

BEGIN = "<!-- written by python -m benchmarks.looks -->"
END = "<!-- end of looks -->"
LEVEL = 0.025  # of one side
RULES = ("last alone", "pooled", "corrected", "from the second")
RUNS = ((5, 12), (6, 14), (3, 5), (3, 3, 3))  # seeds of runs that were pooled
WEIGHTS = ("seeds", "inverse variances")
CHECKED = 20  # trials that are compared with tools/designs.py


def draw_means(
    random: np.random.Generator, seeds: Sequence[int], trials: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return means and their variances, each (trials, runs), of runs with these seeds."""
    runs = [random.standard_normal((trials, number)) for number in seeds]
    means = np.stack([values.mean(axis=1) for values in runs], axis=1)
    variances = [values.var(axis=1, ddof=1) / values.shape[1] for values in runs]
    return means, np.stack(variances, axis=1)


def hold_until(random: np.random.Generator, seeds: Sequence[int], trials: int) -> list[float]:
    """Return the share of claims that hold at one of the answers, for each of ``RULES``."""
    means, variances = draw_means(random, seeds, trials)
    numbers = np.asarray(seeds)
    ratios = means / np.sqrt(variances)
    tails = stats.t.sf(ratios, numbers - 1)  # one-sided p of each answer
    weights = np.sqrt(numbers)
    scores = np.cumsum(weights * stats.norm.isf(tails), axis=1) / np.sqrt(np.cumsum(numbers))
    looks = np.arange(1, len(seeds) + 1)
    corrected = 2.0 ** np.where(looks > 1, looks, 0) * stats.norm.sf(scores)
    _check_against_library(means, variances, numbers, corrected)
    from_the_first = corrected.copy()
    if len(seeds) > 1:
        from_the_first[:, 0] *= 2
    pooled = _pooled_tails(means, variances, numbers)
    by_rule = (tails, pooled, from_the_first, corrected)
    return [100 * float((p < LEVEL).any(axis=1).mean()) for p in by_rule]


def _pooled_tails(means: np.ndarray, variances: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return one-sided p (trials, answers) of Student's t over all seeds up to each answer."""
    totals = np.cumsum(numbers)
    mean = np.cumsum(numbers * means, axis=1) / totals
    squares = np.cumsum(numbers * (numbers - 1) * variances + numbers * means**2, axis=1)
    variance = (squares - totals * mean**2) / (totals - 1)
    return stats.t.sf(mean / np.sqrt(variance / totals), totals - 1)


def _check_against_library(
    means: np.ndarray, variances: np.ndarray, numbers: np.ndarray, corrected: np.ndarray
) -> None:
    for trial in range(CHECKED):
        runs = [
            Difference(
                float(mean), (SourceVariance(float(variance), int(n) - 1),), OVER_SEEDS, int(n), 0
            )
            for mean, variance, n in zip(means[trial], variances[trial], numbers, strict=True)
        ]
        p = correct_for_looks(combined_p(runs, 0.0, 1.0), len(runs)) / 2
        if corrected[trial, -1] < 0.5:  # else the other side
            assert np.isclose(p, corrected[trial, -1]), (p, corrected[trial])


def exclude_by_weights(
    random: np.random.Generator, seeds: Sequence[int], trials: int
) -> list[float]:
    """Return the share of pooled intervals that lie above 0, for each of ``WEIGHTS``."""
    means, variances = draw_means(random, seeds, trials)
    numbers = np.asarray(seeds)
    shares = []
    for weights in (np.broadcast_to(numbers, means.shape), 1 / variances):
        parts = weights / weights.sum(axis=1, keepdims=True)
        mean = (parts * means).sum(axis=1)
        terms = parts**2 * variances
        freedom = terms.sum(axis=1) ** 2 / (terms**2 / (numbers - 1)).sum(axis=1)
        half = stats.t.ppf(1 - LEVEL, freedom) * np.sqrt(terms.sum(axis=1))
        if not shares:
            runs = [
                Difference(
                    float(means[0, run]),
                    (SourceVariance(variances[0, run], n - 1),),
                    OVER_SEEDS,
                    n,
                    0,
                )
                for run, n in enumerate(seeds)
            ]
            assert np.isclose(pool_differences(runs).half_width() or 0.0, half[0])
        shares.append(100 * float((mean > half).mean()))
    return shares


def recorded_answers() -> list[tuple[int, ...]]:
    """Return the seeds of every answer of each claim of pipelines/, in order."""
    _, pooled = evaluate_pooled(load_rounds(Path()))
    return [
        (*(len(earlier.seeds) for earlier in each.earlier), each.last_seeds)
        for each in pooled
        if each.answer.source and each.answer.entry and each.last_seeds > 1
    ]


def table_rows(trials: int, seed: int) -> Iterator[list[str]]:
    """Yield the rows of the first table: by number of answers, then all claims."""
    random = np.random.default_rng(seed)
    recorded = Counter(recorded_answers())
    rates = {seeds: hold_until(random, seeds, trials) for seeds in recorded}
    lengths = sorted({len(seeds) for seeds in recorded})
    groups = {f"{n}": [seeds for seeds in recorded if len(seeds) == n] for n in lengths}
    for words, members in (groups | {"all": list(recorded)}).items():
        counts = [recorded[seeds] for seeds in members]
        means = np.average([rates[seeds] for seeds in members], axis=0, weights=counts)
        yield [words, str(sum(counts)), *(f"{mean:.1f}" for mean in means)]


def main() -> None:
    """Print both tables, and write them between the marks of a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="put the tables into this file")
    asked = parser.parse_args()
    head = ("answers", "claims", *RULES)
    lines = markdown_table(head, list(table_rows(asked.trials, asked.seed)))
    random = np.random.default_rng(asked.seed)
    rows = [
        [
            " + ".join(map(str, seeds)),
            *(f"{share:.1f}" for share in exclude_by_weights(random, seeds, asked.trials)),
        ]
        for seeds in RUNS
    ]
    found = "\n".join([*lines, "", *markdown_table(("seeds of the runs", *WEIGHTS), rows)])
    print(found)
    if asked.write:
        text = asked.write.read_text(encoding="utf-8")
        start = text.index(BEGIN) + len(BEGIN)
        new = f"{text[:start]}\n\n{found}\n\n{text[text.index(END) :]}"
        asked.write.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
