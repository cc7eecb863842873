"""Measured files of a small study of ages, as easy numbers of method and seed."""

from pathlib import Path
from typing import Any

import numpy as np

from moecore.brain.age_correction import METRICS
from moecore.core.files import write_json
from moecore.measure import attack_audit, cohort_checks, values
from moecore.measure.probes import simulated_people
from moecore.statistics.intervals import Interval
from moecore.tasks.regression import Regression
from moecore.training.outcome import Outcome
from tests.report import generated
from tests.report.generated import found_under_attack, write_result

STAGES = ("calibrate", "robustness", "cohort_checks")
TASK = Regression(target="age", unit="years", mean=60.0, deviation=10.0)


def write_ages(root: Path, methods: dict, seeds: list[int], simulated: bool = True) -> None:
    """Everything that ``compare`` reads of a study of one phase; methods as in write_results."""
    write_json(root / "artifacts/data/pretrain/card.json", card(simulated))
    for number, (method, routed) in enumerate(methods.items()):
        for seed in seeds:
            where = Path(f"pretrain/{method}/{seed}.json")
            write_result(root, "", where, trained(number, seed, routed))
            write_result(root, "calibrate", where, calibrated(number, seed, simulated))
            write_result(root, "robustness", where, attacked(number))
            write_result(root, "cohort_checks", where, checked(seed, routed))


def card(simulated: bool = True) -> dict[str, Any]:
    counts = {split: {"F": 5, "M": 5} for split in ("train", "validation", "test")}
    changes = {"name": "Small cohort", "task": TASK.model_dump(), "size": [64] * 3}
    changes |= {"images": {"train": 60, "validation": 20, "test": 40}, "target_range": [40.5, 85.0]}
    changes |= {"regions": ["wm", "gm", "csf"], "voxel_mm": [3.0] * 3, "skipped": []}
    return generated.card("pretrain") | changes | {"counts": counts, "simulated": simulated}


def limits(value: float, width: float = 0.5) -> dict[str, float]:
    return {"value": value, "low": value - width, "high": value + width}


def trained(number: int, seed: int, routed: bool) -> Outcome:
    """Test MAE 4 + method + 0.1 · seed."""
    curve = []
    for step in (1, 2, 3):
        losses = {"train_loss": 9.0 / step, "train_mae": 9.0 / step}
        validation = {"validation_mae": 10.0 / step + number}
        curve.append({"step": step, "epoch": float(step)} | losses | validation)
    probes = [{"epoch": epoch, "rows": probe(epoch)} for epoch in (1, 5, 9)] if routed else []
    facts = {"test_loss": 0.4, "test_count": 40, "epochs": 9, "images_per_second": 20.0}
    facts |= {"seconds": 60.0 + seed, "parameters": 1000, "curve": curve, "region_routing": probes}
    facts |= {"active_parameters": 600 if routed else 1000, "validation_score": limits(4.5)}
    return Outcome(task=TASK, test_score=limits(4 + number + 0.1 * seed), **facts)


def probe(epoch: int) -> list[dict[str, Any]]:
    """The region's expert has 0.3 + 0.05 · epoch of its tokens, 0.25 of random ones."""
    rows = []
    for region in ("wm", "gm", "csf"):
        for name, share in ((region, 0.3 + 0.05 * epoch), (f"random_{region}", 0.25)):
            shares = {"wm": 0.0, "gm": 0.0, "csf": 0.0, "free_0": 1 - share, region: share}
            experts = [[region, 0.5], ["free_0", 0.25]]
            rows.append({"region": name, "experts": experts, "share": shares})
    return rows


def calibrated(number: int, seed: int, simulated: bool) -> values.Found:
    """Raw MAE as trained, corrected 3.5 + method + 0.1 · seed, median predictor 10."""
    generator = np.random.default_rng(seed)
    ages = generator.uniform(45, 85, 40)
    raw = 15 + 0.75 * ages + generator.normal(0, 2, 40)
    points = {"age": ages.tolist(), "sex": ["F", "M"] * 20, "raw": raw.tolist()}
    points["pooled"] = ((raw - 15) / 0.75).tolist()
    out = values.Values(METRICS, TASK, lambda name, compute: compute())
    out.put("median_mae", 10.0)
    lines = {"raw": (4.0, -0.6, 0.75), "pooled": (3.5, -0.1, 0.95)}
    lines["sex_specific"] = (3.6, -0.125, 0.94)
    for name, (mae, corr, slope) in lines.items():
        error = mae + number + 0.1 * seed
        out.put(f"mae_{name}", half_a_year(error))
        out.put(f"corr_{name}", half_a_year(corr))
        out.put(f"corr_size_{name}", -corr)
        out.put(f"slope_{name}", half_a_year(slope))
        out.put(f"intercept_{name}", half_a_year(60 - 60 * slope))
        if name == "raw":
            out.put("mae_of_median", error / 10)
    out.put("interval_radius", 7.0)
    out.put("interval_coverage", Interval(0.9, 0.85, 0.95))
    out.facts |= {"uses_age": False, "simulated": simulated, "n_test": 40, "fit_on": "out_of_fold"}
    out.facts |= {"refused": None, "age_range": [45.0, 85.0], "by_sex": groups("FM")}
    out.facts |= {"by_decade": groups(("50–59", "60–69")), "by_site": groups("a")}
    out.facts |= {"diagnosis_gaps": [], "points": points}
    return out.found()


def half_a_year(value: float) -> Interval:
    return Interval(value, value - 0.5, value + 0.5)


def groups(names) -> list[dict[str, Any]]:
    errors = {"raw": {"mae": limits(4.0)}, "pooled": {"mae": limits(3.0)}}
    return [{"group": name, "n": 20} | errors for name in names]


def attacked(number: int) -> values.Found:
    """4 + method + 255 ε years under each attack, half a year more under the worst."""
    halves = {"pgd-10": 0.5, "fgsm": -0.5}
    curves = {name: [row(number, step, halves[name]) for step in (0, 1, 2)] for name in halves}
    changes = dict.fromkeys(curves, [0.0, 0.1, 0.2])
    line = {"name": "deterministic model", "holds": True, "text": "two passes agree"}
    return found_under_attack(curves, TASK, 40, changes, 1, audit=[line])


def row(number: int, step: int, half: float) -> attack_audit.ScoresAtEpsilon:
    """Images err by ``half`` a year more or less in turn; methods differ by ± 0.01, too."""
    error = 4.0 + number + step
    signs = [(more, sign) for more in (1, -1) for sign in (1, -1)]
    scores = [error + sign * half + 0.01 * number * more for more, sign in signs] * 10
    limits = {"low": error - 1, "high": error + 1}
    return attack_audit.ScoresAtEpsilon(epsilon=step / 255, score=error, scores=scores, **limits)


def checked(seed: int, routed: bool) -> values.Found:
    # Isolated: wm 9, gm 8, csf 7 + 0.1 · seed, and probes 6.5, 6, 4.25 + 0.2 · seed. Of the whole
    # volume 2.75; rescans 0.5 years apart.
    out = values.Values(cohort_checks.CohortChecks.metrics, TASK, lambda name, compute: compute())
    tissues = {"wm": (9.0, 6.5), "gm": (8.0, 6.0), "csf": (7.0, 4.25)}
    out.put("whole_mae", Interval(4.0, 3.0, 5.0))
    out.put("whole_probe_mae", Interval(2.75, 2.25, 3.0))
    for name, (value, probe) in tissues.items():
        mae = value + 0.1 * seed
        probed = probe + 0.2 * seed
        out.put(f"isolated_{name}", Interval(mae, mae - 1, mae + 1))
        out.put(f"probe_{name}", Interval(probed, probed - 0.5, probed + 0.25))
    out.put("wm_over_gm", Interval(0.5, -0.25, 1.0))
    out.put("gm_over_csf", Interval(1.75, 1.5, 2.25))
    out.put("monotone", 0.75)
    out.put("ageing_rank", 0.95)
    out.put("rescan", Interval(0.5, 0.4, 0.6))
    out.facts["ageing"] = {"ages": [50, 60, 70], "predictions": [[52, 60, 66], [50, 58, 69]]}
    out.facts["not_checked"] = {} if routed else {"generalisation": "it has no region experts"}
    if routed:
        cohort_checks.put_region_generalisation(generalised(seed), out)
    return out.found()


def generalised(seed: int) -> simulated_people.RegionExpertGeneralisation:
    # Isolated 0.9, mixed 0.7 + 0.01 · seed, whole 0.6, of the other generator 0.8 and 0.5; chance
    # 0.375.
    def agreement(share: float) -> simulated_people.TissueAgreement:
        over = share - 0.375
        agreed = Interval(share, share - 0.0625, share + 0.0625)
        gained = Interval(over, over - 0.125, over + 0.125)
        shares = {"permuted": 0.375, "fixed": 0.65, "same_place": 0.55}
        return simulated_people.TissueAgreement(
            people=9, cubes=90, agreement=agreed, over_chance=gained, **shares
        )

    ranks = {name: Interval(0.5, 0.25, 0.75) for name in ("wm", "gm", "csf")}
    return simulated_people.RegionExpertGeneralisation(
        test=simulated_people.RegionExpertAgreement(agreement(0.6), agreement(0.9), ranks),
        mixed=agreement(0.7 + 0.01 * seed),
        mixtures={("wm", "gm", 0.25): agreement(0.7)},
        other=simulated_people.RegionExpertAgreement(agreement(0.5), agreement(0.8), ranks),
    )
