"""The papers' claims, judged by all runs of their design in this repository's history.

Answers that later results replaced are in pipelines/results/earlier.json, which
``python -m tools.earlier_answers`` extracts from git, once. Runs are of one design if
``design_digest`` of their settings agrees; they give one estimate and one verdict, corrected for
the number of a claim's answers and then by Holm. Other designs of the same comparison stand beside
it. docs/intervals.md has the rules, with simulated rates of false verdicts.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from moecore.core.config import Config
from moecore.report.claims import evaluation
from moecore.report.claims.answers import Answer, Studies, apply_holm_per_paper, collect_answers
from moecore.report.claims.items_and_dates import (
    DEFAULTS,
    REPLACED_JSON,
    design_digest_of_round,
    read_stored_side_values,
)
from moecore.report.tables.cells import NumberFormat
from moecore.statistics.comparisons import (
    OVER_ITEMS_AND_SEEDS,
    OVER_SEEDS,
    Difference,
    SourceVariance,
)
from moecore.statistics.intervals import Interval
from moecore.study import papers
from moecore.study.params_reader import validate_document
from moecore.study.questions import QuestionRound
from moecore.study.run_and_claims import Claim, Comparison, compared_quantity_key
from moecore.study.yaml_document import did_you_mean, load_yaml_document
from tools.designs import (
    RandomEffects,
    combined_p,
    correct_for_looks,
    has_collapsed_seed,
    pool_differences,
    random_effects,
    sign_test,
)

OTHER = "other"  # design: the answer is of another metric or of other methods


class EarlierAnswer(Config):
    """One earlier answer to a claim."""

    claim: str = Field(description="folder/name in pipelines/<folder>/paper.yaml")
    question: str = Field(description="the study that answered, by its name at that time")
    commit: str
    date: str
    seeds: tuple[int, ...] = Field(min_length=2)
    better: str = Field(description="the direction that was claimed at that time")
    verdict: Literal["holds", "differs", "open"]
    verdict_holm: Literal["holds", "differs", "open", ""] = ""
    mean: float
    low: float
    high: float
    method: float = Field(description="mean of the claim's method")
    against: float
    kind: Literal["items × seeds", "seeds"]
    items: int
    variances: tuple[float, ...] | None = Field(description="over seeds, and items; null: unknown")
    freedoms: tuple[float, ...] | None
    design: str = Field(description="its digest, or other")
    why: str = Field("", description="why the design is another one")

    @property
    def difference(self) -> Difference | None:
        """The difference with its variances; None if they are unknown."""
        if self.variances is None or self.freedoms is None:
            return None
        sources = tuple(map(SourceVariance, self.variances, self.freedoms))
        return Difference(self.mean, sources, self.kind, len(self.seeds), self.items)


class EarlierAnswers(Config):
    """The content of earlier.json."""

    answers: tuple[EarlierAnswer, ...]


class Run(NamedTuple):
    """A comparison's numbers in one run of a study."""

    study: str  # its round, or its name at that time
    design: str
    seeds: tuple[int, ...]
    difference: Difference
    sides: tuple[float, float]  # means of the two methods
    values: np.ndarray | None  # difference of each seed (S,), if it is known
    is_replaced: bool = False  # by a later result: no question may have its design now


class Designs(NamedTuple):
    """A comparison's estimates in all designs of present questions, and their mean."""

    estimates: Mapping[str, Difference]  # study → its design's difference
    effects: RandomEffects
    holding: int  # designs in which the claim holds, without corrections


class PooledAnswer(NamedTuple):
    """An answer with what is printed beside it; a claim's entry is over all runs of its design."""

    answer: Answer
    earlier: tuple[EarlierAnswer, ...] = ()  # to this claim, the oldest first
    designs: Designs | None = None  # None: one design
    last_seeds: int = 0  # seeds of the last answer, before any pooling

    @property
    def looks(self) -> int:
        """The number of answers that the claim has had."""
        return self.answer.entry.get("looks", 1)


def load_earlier_answers(
    root: Path, named: Mapping[str, Mapping[str, Any]]
) -> tuple[EarlierAnswer, ...]:
    """Return the project's earlier answers, the oldest first; UserError for an invalid file.

    named: the papers' claims by name, ``folder/name``.
    """
    path = root / REPLACED_JSON
    if not path.is_file():
        return ()
    document = load_yaml_document(path)
    answers = validate_document(EarlierAnswers, document).answers
    seen = set()
    for index, answer in enumerate(answers):
        keys = ("answers", index)
        if answer.claim not in named:
            hint = did_you_mean(answer.claim, list(named))
            text = f"found {answer.claim!r}{hint}; allowed: claims of pipelines/*/paper.yaml"
            raise document.error((*keys, "claim"), text)
        sizes = [len(answer.variances or ()), len(answer.freedoms or ())]
        expected = len(answer.kind.split(" × "))
        if sizes not in ([0, 0], [expected, expected]):
            text = f"found {sizes[0]} variances and {sizes[1]} freedoms"
            text = f"{text}; allowed: {expected} of each over {answer.kind}, or null for both"
            raise document.error((*keys, "variances"), text)
        identity = (answer.claim, answer.question, answer.mean)
        if identity in seen:
            text = f"found {answer.claim} of {answer.question} again; allowed: each answer once"
            raise document.error(keys, text)
        seen.add(identity)
    return answers


def pool_by_design(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Return design → its runs with different seeds; of runs that share some, the last one.

    runs: the oldest first. A run whose variance over seeds is not known is left out.
    """
    chosen: dict[str, list[Run]] = defaultdict(list)
    for run in reversed(runs):
        taken = {seed for other in chosen[run.design] for seed in other.seeds}
        if run.difference.kind in (OVER_ITEMS_AND_SEEDS, OVER_SEEDS) and taken.isdisjoint(
            run.seeds
        ):
            chosen[run.design].insert(0, run)
    return {design: of_design for design, of_design in chosen.items() if of_design}


def judge_runs(
    entry: Mapping[str, Any], claim: Comparison, good: str, runs: Sequence[Run], looks: int
) -> dict[str, Any]:
    """Return the claim's numbers over all ``runs`` of its design, corrected for its looks.

    entry: the numbers of the last run, which stay as they are with one run and one look. good:
    whether "higher" or "lower" is better for the metric. looks: number of the claim's answers.
    """
    if looks == 1 and len(runs) == 1:
        return dict(entry)
    differences = [run.difference for run in runs]
    pooled = pool_differences(differences)
    gap, _ = evaluation.verdict_gap_and_level(pooled, claim, good)
    null = _tested_value(pooled.value, claim, good)
    p = combined_p(differences, null, pooled.value - null)
    if claim.margin is not None and gap >= 0:
        p = p / 2
    corrected = correct_for_looks(p, looks)
    verdict = evaluation.verdict_from_p(corrected, pooled, claim, good)
    numbers = dict(entry)
    numbers |= evaluation.verdict_to_json(pooled, entry["form"], verdict, corrected, None)
    if len(runs) > 1:
        weights = [run.difference.seeds / pooled.seeds for run in runs]
        for side, name in enumerate(("method", "against")):
            mean = float(np.dot(weights, [run.sides[side] for run in runs]))
            numbers[name] = {"mean": mean, "form": entry["form"], "seeds": pooled.seeds}
    of_runs = [
        {
            "study": run.study,
            "seeds": list(run.seeds),
            "mean": run.difference.value,
            "variances": [source.variance for source in run.difference.sources],
            "freedoms": [source.freedom for source in run.difference.sources],
        }
        for run in runs
    ]
    return numbers | {"p_combined": p, "looks": looks, "runs": of_runs}


def _tested_value(value: float, claim: Comparison, good: str) -> float:
    """Return what the difference is tested against: 0, or the nearer end of the margin."""
    if claim.margin is None:
        return 0.0
    if claim.better == "equivalent":
        return math.copysign(claim.margin, value)
    return -claim.margin if good == "higher" else claim.margin


def sign_test_of_collapse(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the sign test of the seeds whose differences are known, if one of them collapsed."""
    known = [run.values for run in runs if run.values is not None]
    values = np.concatenate([np.zeros(0), *known])
    if not has_collapsed_seed(values):
        return {}
    signs = [int((values > 0).sum()), int((values < 0).sum())]
    return {"signs": signs, "p_sign": sign_test(values)}


def compare_designs(
    by_design: Mapping[str, Sequence[Run]], claim: Comparison, good: str
) -> Designs | None:
    """Return the comparison in the designs of present questions; None for fewer than two."""
    estimates = {}
    for runs in by_design.values():
        difference = pool_differences([run.difference for run in runs])
        is_present = not all(run.is_replaced for run in runs)
        if is_present and sum(source.variance for source in difference.sources) > 0:
            estimates[runs[-1].study] = difference
    if len(estimates) < 2:
        return None
    variances = [
        sum(source.variance for source in difference.sources) for difference in estimates.values()
    ]
    effects = random_effects([each.value for each in estimates.values()], variances)
    verdicts = [evaluation.verdict_on_difference(each, claim, good) for each in estimates.values()]
    return Designs(estimates, effects, verdicts.count("holds"))


def evaluate_pooled(rounds: Iterable[QuestionRound]) -> tuple[Studies, list[PooledAnswer]]:
    """Return round → result, and all answers; claims over all runs of their design, with Holm.

    Raises UserError for an invalid file of earlier answers.
    """
    rounds = list(rounds)
    studies, answers = collect_answers(rounds)
    if not rounds:
        return studies, []
    root = rounds[0].question.root
    named = {name: DEFAULTS | claim for name, claim in papers.load_named_claims(root).items()}
    earlier = load_earlier_answers(root, named)
    runs = _list_runs(answers, earlier, named, {study.name: study for study in rounds}, studies)
    designs = {(run.study, key): run.design for key, of_key in runs.items() for run in of_key}
    identities = {name: _identity(claim) for name, claim in named.items()}
    times = Counter(_identity(answer.claim.model_dump()) for answer in answers if answer.entry)
    pooled = []
    for answer in answers:
        if not answer.entry or not isinstance(answer.claim, Claim):
            pooled.append(PooledAnswer(answer))
            continue
        key = compared_quantity_key(answer.claim.model_dump())
        last_seeds = answer.entry["difference"]["seeds"]
        identity = _identity(answer.claim.model_dump())
        before = tuple(each for each in earlier if identities[each.claim] == identity)
        by_design = pool_by_design(runs[key])
        if of_design := by_design.get(designs[answer.study, key]):
            looks = len(before) + times[identity]
            entry = judge_runs(answer.entry, answer.claim, answer.good, of_design, looks)
            answer = answer._replace(entry=entry | sign_test_of_collapse(of_design))
        others = compare_designs(by_design, answer.claim, answer.good)
        pooled.append(PooledAnswer(answer, before, others, last_seeds))
    corrected = apply_holm_per_paper([each.answer for each in pooled])
    return studies, [
        each._replace(answer=answer) for each, answer in zip(pooled, corrected, strict=True)
    ]


def _list_runs(
    answers: Sequence[Answer],
    earlier: Sequence[EarlierAnswer],
    named: Mapping[str, Mapping[str, Any]],
    rounds: Mapping[str, QuestionRound],
    studies: Studies,
) -> dict[tuple[Any, ...], list[Run]]:
    """Return compared quantity → its runs, the earlier ones first."""
    runs: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    by_former_name = {study.old_name: study for study in rounds.values() if study.old_name}
    for before in earlier:
        difference = before.difference
        if difference is None or before.design == OTHER:
            continue
        claim = named[before.claim]
        asked = Comparison.model_validate({key: claim[key] for key in DEFAULTS})
        values = None
        if before.question in by_former_name:
            values = _kept_seed_means(by_former_name[before.question], asked, studies)
        if values is not None and not np.isclose(values.mean(), before.mean):
            values = None  # of the result that replaced it
        sides = (before.method, before.against)
        run = Run(before.question, before.design, before.seeds, difference, sides, values, True)
        runs[compared_quantity_key(claim)].append(run)
    measured = [answer for answer in answers if answer.entry]
    studies_of = {(compared_quantity_key(a.claim.model_dump()), a.study) for a in measured}
    times = Counter(key for key, _ in studies_of)
    for answer in answers:
        if answer.entry:
            study = rounds[answer.study]
            composed = study.compose()
            difference = evaluation.difference_from_json(answer.entry)
            sides = (answer.entry["method"]["mean"], answer.entry["against"]["mean"])
            values = _kept_seed_means(study, answer.claim, studies)
            seeds = tuple(composed.document.data["run"]["seeds"])
            key = compared_quantity_key(answer.claim.model_dump())
            # Settings that changed since the run do not say its design; one run needs none.
            design = study.name
            if not answer.changed and (runs[key] or times[key] > 1):
                design = design_digest_of_round(study, answer.claim)
            run = Run(study.name, design, seeds, difference, sides, values)
            runs[key].append(run)
    return runs


def _kept_seed_means(
    study: QuestionRound, claim: Comparison, studies: Studies
) -> np.ndarray | None:
    """Return the difference of each seed (S,), if the round's result keeps these items."""
    sides = read_stored_side_values(study, studies[study.name], claim)
    if sides is None:
        return None
    ours, theirs = sides
    return (ours - theirs).reshape(len(ours), -1).mean(axis=1)


def _identity(claim: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a claim keeps when its metric or its studies change: its sentence."""
    return tuple(claim.get(key) for key in ("paper", "source", "says"))


def describe_history(pooled: PooledAnswer) -> str:
    """Return what stands beside a claim's row: its runs, earlier answers and other designs."""
    answer = pooled.answer
    if not answer.entry:
        return ""
    form = answer.entry["form"]
    texts = []
    runs = answer.entry.get("runs", ())
    if len(runs) > 1:
        shown = NumberFormat.of(form, [Interval(run["mean"]) for run in runs])
        means = [
            f"{run['study']} {shown.difference(run['mean'])} ({len(run['seeds'])} seeds)"
            for run in runs
        ]
        texts.append(f"over all runs of this design: {', '.join(means)}")
    if pooled.earlier:
        earlier = [_describe_earlier(each, form) for each in pooled.earlier]
        texts.append(f"before: {'; '.join(earlier)}")
    if "signs" in answer.entry:
        above, below = answer.entry["signs"]
        p = answer.entry["p_sign"]
        texts.append(f"a seed collapsed: {above} seeds > 0, {below} < 0, sign test p = {p:.2g}")
    if designs := pooled.designs:
        values = [difference.value for difference in designs.estimates.values()]
        shown = NumberFormat.of(form, [designs.effects.interval, *map(Interval, values)])
        each = [
            f"{study} {shown.difference(difference.value)}"
            for study, difference in designs.estimates.items()
        ]
        mean = shown.difference(designs.effects.interval.value)
        limits = shown.difference_limits(designs.effects.interval)
        holding = f"holds in {designs.holding} of {len(values)} designs"
        texts.append(f"{holding}: {', '.join(each)}; random effects {mean} [{limits}]")
    return ". ".join(texts)


def _describe_earlier(answer: EarlierAnswer, form: str) -> str:
    verdict = answer.verdict.replace("open", "not significant")
    if answer.verdict_holm not in ("", answer.verdict):
        verdict += " (not with Holm)"
    shown = NumberFormat.of(form, [Interval(answer.mean, answer.low, answer.high)])
    numbers = f"{shown.difference(answer.mean)} ({len(answer.seeds)} seeds)"
    text = f"{answer.question} {answer.date[:10]} {numbers}, {verdict}"
    return f"{text} [{answer.why}]" if answer.why else text
