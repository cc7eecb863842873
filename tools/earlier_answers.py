"""Extract the papers' claims that were answered before from the git history, once.

    python -m tools.earlier_answers     # writes pipelines/results/earlier.json

A line per answer that a later result replaced: its numbers, seeds and verdict, the commit that
stored it, and the digest of its design (``design_digest``) from the params.yaml of that commit.
Older results have no variances. The two of an interval over items and seeds follow from half its
width and from its smallest detectable difference or its p, which are linear in them; where neither
was stored, they are unknown (null). A clone without this history cannot write the file again.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import scipy

from moecore.core.files import UserError, write_atomic
from moecore.core.source_layout import run_git
from moecore.report.claims.answers import collect_answers
from moecore.report.claims.items_and_dates import DEFAULTS, REPLACED_JSON, has_full_git_history
from moecore.report.tables.metrics_by_method import expected_metrics
from moecore.statistics.comparisons import OVER_ITEMS, OVER_ITEMS_AND_SEEDS, OVER_SEEDS, POWER
from moecore.study import papers
from moecore.study.questions import load_rounds
from moecore.study.run_and_claims import Claim, Comparison, compared_quantity_key, design_digest
from moecore.study.study import read_study
from moecore.study.yaml_document import parse_yaml_document

PATHS = ("pipelines/*/reports/compare.json", "pipelines/results/*/*.json")
WORDS = re.compile(r"\d+: (\S+), (\S+): (\S+) of (\S+) (higher|lower) than of (\S+)")
WORDS_OF_VERDICTS = {"contradicted": "differs"}  # of older versions
# Claims that were asked of another metric, phase or pair before: paper, metric, both methods.
REWORDED = {
    ("adversarial", "accuracy_pgd", "vmoe_32", "dense", "pretrain"): ["adversarial/pretrained"],
    ("adversarial", "accuracy_pgd", "vmoe_32", "dense", "finetune"): ["adversarial/fine_tuned"],
    ("adversarial", "accuracy_pgd", "vmoe_32", "dense", "adversarial"): [
        "adversarial/adversarially_trained"
    ],
    ("adversarial", "accuracy_pgd", "dense_big", "vmoe_32", "finetune"): ["adversarial/big_dense"],
    ("adversarial", "accuracy_pgd", "vmoe_32", "vmoe_2", "pretrain"): ["adversarial/more_experts"],
    ("adversarial", "accuracy_pgd", "vmoe_32", "vmoe_8", "finetune"): [
        "adversarial/more_than_two_alike"
    ],
    ("adversarial", "accuracy_pgd", "vmoe_32", "vmoe_16", "pretrain"): [
        "adversarial/16_to_32_experts"
    ],
    ("adversarial", "accuracy_pgd-balance", "vmoe_32_capacity", "vmoe_32_capacity", "pretrain"): [
        "adversarial/attacked_balance"
    ],
    ("adversarial", "accuracy_apgd", "vmoe_32", "dense", "finetune"): ["adversarial/autopgd_ahead"],
    ("PRC", "match_top1", "prc", "vmoe", "pretrain"): ["prc/views_top_1"],
    ("PRC", "match_top2_ordered", "prc", "vmoe", "pretrain"): ["prc/views_top_2_ordered"],
    ("PRC", "match_top2_sets", "prc", "vmoe", "pretrain"): ["prc/views_top_2"],
    ("PRC", "confidence_highest", "prc", "vmoe", "pretrain"): ["prc/surer_first"],
    ("PRC", "confidence_second", "prc", "vmoe", "pretrain"): ["prc/second_expert"],
    ("PRC", "confidence_others", "prc", "vmoe", "pretrain"): ["prc/other_experts"],
    ("TGR", "agreement_consecutive", "tgr", "vmoe", "pretrain"): [
        "tgr/consecutive_epochs",
        "tgr/early_epochs",
    ],
    ("ERMoE", "fallback_threshold_0_9", "ermoe", "ermoe", "pretrain"): ["ermoe/fallback_rises"],
    ("ERMoE", "load_cv2", "ermoe", "vmoe", "pretrain"): ["ermoe/load_without_losses"],
    ("MoGE", "test_nats", "smoge_k1", "smoe_k1", "pretrain"): ["moge/one_expert_per_word"],
    ("MoGE", "test_accuracy", "moge_32_k2", "moe_32_k2", "pretrain"): ["moge/128_experts_top_2"],
    ("MoGE", "test_accuracy", "moge_32", "moge_sigma_3", "pretrain"): ["moge/narrowing_sigma"],
    ("MoGE", "test_accuracy", "moge_32", "moge_gamma_3", "pretrain"): ["moge/gamma"],
    ("MoGE", "test_accuracy", "moge_32", "moge_end_0_5", "pretrain"): ["moge/least_sigma"],
}


class StoredAnswer(NamedTuple):
    """A claim's numbers in a compare.json of the history."""

    commit: str
    date: str
    path: str
    asked: dict[str, Any]  # paper, metric, methods, phase, better, margin
    entry: dict[str, Any]


def read_history(root: Path) -> Iterator[StoredAnswer]:
    """Yield the claims' answers in all results of the history, the oldest first."""
    log = run_git(root, "log", "--reverse", "--name-only", "--format=@%H %cI", "--", *PATHS) or ""
    commit = date = ""
    for line in log.splitlines():
        if line.startswith("@"):
            commit, date = line[1:].split()
        elif line and (text := run_git(root, "show", f"{commit}:{line}")):
            for words, entry in (json.loads(text).get("claims") or {}).items():
                asked = entry.get("asked") or _parse_words(words)
                yield StoredAnswer(commit, date, line, DEFAULTS | asked, entry)


def _parse_words(words: str) -> dict[str, Any]:
    """Return what the key of a claim says, in results that do not store the claim itself."""
    match = WORDS.fullmatch(words)
    if match is None:
        raise UserError.at(words, found="no claim", allowed="paper, phase: metric of a than of b")
    keys = ("paper", "phase", "metric", "method", "better", "against")
    return dict(zip(keys, match.groups(), strict=True))


def derive_variances(
    entry: Mapping[str, Any], seeds: int, margin: float | None
) -> tuple[list[float], list[int]] | None:
    """Return the variances of a stored difference with their freedoms; None if unknown."""
    stored = entry["difference"]
    if "variances" in stored:
        return stored["variances"], stored["freedoms"]
    half = (stored["high"] - stored["low"]) / 2
    quantile = scipy.special.stdtrit
    if stored["interval"] in ("t", OVER_SEEDS):
        return [(half / quantile(seeds - 1, 0.975)) ** 2], [seeds - 1]
    if stored["interval"] == OVER_ITEMS:
        return [(half / quantile(stored["items"] - 1, 0.975)) ** 2], [stored["items"] - 1]
    freedoms = [seeds - 1, stored["items"] - 1]
    if entry.get("smallest") is not None:
        other, upper = entry["smallest"] - half, 0.5 + (2 * POWER - 1) / 2
    elif entry.get("p", 0) > 1e-9 and margin is None:
        other, upper = abs(stored["mean"]), 1 - entry["p"] / 2
    elif entry.get("p", 0) > 1e-9 and abs(stored["mean"]) < margin:  # two one-sided tests
        other, upper = margin - abs(stored["mean"]), 1 - entry["p"]
    else:
        return None
    # half² = t²A + u²B at two levels: two linear equations in A and B.
    (a, b), (c, d) = (
        [float(quantile(freedom, level)) ** 2 for freedom in freedoms] for level in (0.975, upper)
    )
    determinant = a * d - b * c
    by_seeds = (half**2 * d - b * other**2) / determinant
    by_items = (a * other**2 - half**2 * c) / determinant
    if min(by_seeds, by_items) < -0.01 * max(by_seeds, by_items):
        return None  # another formula than today's
    return [max(0.0, by_seeds), max(0.0, by_items)], freedoms


def measuring_stages(root: Path) -> dict[str, str]:
    """Return metric → the stage that measures it, of all metrics that claims name now."""
    stages = {}
    for study in load_rounds(root):
        composed = study.compose()
        for claim in composed.document.data.get("claims") or ():
            phase = claim.get("phase", "pretrain")
            planned = expected_metrics(read_study(composed.document), composed.all_stages, phase)
            if claim["metric"] in planned:
                stages[claim["metric"]] = planned[claim["metric"]].stage
    return stages


@lru_cache
def _read_params(root: Path, commit: str, path: str) -> dict[str, Any]:
    return parse_yaml_document(run_git(root, "show", f"{commit}:{path}") or "{}").data


def list_answers(root: Path) -> list[dict[str, Any]]:
    """Return the entries of the file: one per claim and distinct answer, the oldest first."""
    named = {name: DEFAULTS | claim for name, claim in papers.load_named_claims(root).items()}
    was = {study.name: study.old_name for study in load_rounds(root)}
    _, answers = collect_answers(load_rounds(root))
    current = {
        (was[answer.study], round(answer.entry["difference"]["mean"], 9))
        for answer in answers
        if answer.entry and isinstance(answer.claim, Claim)
    }
    stages = measuring_stages(root)
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for answer in read_history(root):
        question = answer.path.split("/")[1]
        mean = round(answer.entry["difference"]["mean"], 9)
        if question == "results" or (question, mean) in current:
            continue
        for name in _match_present_claims(answer.asked, named):
            if (name, question, mean) not in found:
                found[name, question, mean] = _build_entry(root, name, named[name], answer, stages)
    return list(found.values())


def _match_present_claims(asked: Mapping[str, Any], named: Mapping[str, Any]) -> list[str]:
    """Return the present claim of a former one, as names; its source is matched if possible."""
    same = [
        name
        for name, claim in named.items()
        if claim["paper"] == asked["paper"]
        and compared_quantity_key(claim) == compared_quantity_key(asked)
    ]
    source = [name for name in same if named[name]["source"] == asked.get("source")]
    better = [name for name in source or same if named[name]["better"] == asked["better"]]
    if chosen := better or source or same:
        return chosen[:1]
    keys = ("paper", "metric", "method", "against", "phase")
    return REWORDED.get(tuple(asked[key] for key in keys), [])


def _build_entry(
    root: Path, name: str, claim: Mapping[str, Any], answer: StoredAnswer, stages: Mapping[str, str]
) -> dict[str, Any]:
    entry, asked = answer.entry, answer.asked
    stored = entry["difference"]
    params = _read_params(
        root, answer.commit, answer.path.replace("reports/compare.json", "params.yaml")
    )
    seeds = list(params["run"]["seeds"])
    if len(seeds) != stored["seeds"]:
        raise UserError.at(answer.path, found=f"{seeds} in params.yaml", allowed="its seeds")
    keys = ("metric", "method", "against", "phase")
    changed = [
        f"{key} {asked[key]} instead of {claim[key]}" for key in keys if asked[key] != claim[key]
    ]
    design = "other"
    if not changed:
        design = design_digest(
            params,
            Comparison.model_validate({key: claim[key] for key in DEFAULTS}),
            stages.get(claim["metric"], ""),
        )
    derived = derive_variances(entry, len(seeds), asked["margin"])
    variances, freedoms = derived or (None, None)
    kind = {"t": OVER_SEEDS}.get(stored["interval"], stored["interval"])
    if derived and not math.isclose(sum(variances), 0) and kind == OVER_ITEMS_AND_SEEDS:
        _check_derived(answer, variances, freedoms)
    holm = entry.get("verdict_holm") or ""
    verdict = WORDS_OF_VERDICTS.get(entry["verdict"], entry["verdict"])
    return {
        "claim": name,
        "question": answer.path.split("/")[1],
        "commit": answer.commit[:12],
        "date": answer.date[:16],
        "seeds": seeds,
        "better": asked["better"],
        "verdict": verdict,
        "verdict_holm": WORDS_OF_VERDICTS.get(holm, holm),
        "mean": stored["mean"],
        "low": stored["low"],
        "high": stored["high"],
        "method": entry["method"]["mean"],
        "against": entry["against"]["mean"],
        "kind": kind,
        "items": stored.get("items", 0),
        "variances": variances,
        "freedoms": freedoms,
        "design": design,
        "why": ", ".join(changed),
    }


def _check_derived(answer: StoredAnswer, variances: list[float], freedoms: list[int]) -> None:
    """Raise UserError if the variances do not give the stored interval again."""
    stored = answer.entry["difference"]
    squares = [
        variance * float(scipy.special.stdtrit(freedom, 0.975)) ** 2
        for variance, freedom in zip(variances, freedoms, strict=True)
    ]
    half = (stored["high"] - stored["low"]) / 2
    if not math.isclose(math.sqrt(sum(squares)), half, rel_tol=0.01):
        found = f"variances {variances} for the interval of {answer.asked['metric']}"
        raise UserError.at(f"{answer.commit}:{answer.path}", found=found, allowed="its own")


def main() -> None:
    """Write pipelines/results/earlier.json and print the number of its answers."""
    root = Path()
    if not has_full_git_history(root):
        raise UserError("found no git history, or a part of it; allowed: a whole clone")
    answers = list_answers(root)
    lines = [json.dumps(answer, ensure_ascii=False) for answer in answers]
    text = '{"answers": [\n' + ",\n".join(lines) + "\n]}\n"
    write_atomic(root / REPLACED_JSON, text)
    print(f"{REPLACED_JSON}: {len(answers)} earlier answers")


if __name__ == "__main__":
    main()
