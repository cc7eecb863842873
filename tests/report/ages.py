"""Measured files of a small study of ages, as easy numbers of method and seed."""

from pathlib import Path
from typing import Any

import numpy as np

from moecore.files import write_json

STAGES = ("calibrate", "robustness", "cohort_checks")


def write_ages(root: Path, methods: dict[str, bool], seeds: list[int], simulated: bool = True) -> None:
    """Everything that ``compare`` reads of a study of one phase; ``methods``: name → whether it has MoE layers."""
    write_json(root / "artifacts/data/pretrain/card.json", card(simulated))
    for number, (method, routed) in enumerate(methods.items()):
        for seed in seeds:
            where = f"pretrain/{method}/{seed}.json"
            write_json(root / "artifacts/measured" / where, trained(number, seed, routed))
            for stage, content in (("calibrate", calibrated), ("robustness", attacked), ("cohort_checks", checked)):
                write_json(root / "artifacts/measured" / stage / where, content(number, seed) | ({"simulated": simulated} if stage == "calibrate" else {}))


def card(simulated: bool = True) -> dict[str, Any]:
    return {
        "name": "Small cohort", "kind": "generated", "labels": "real", "target": "age", "unit": "years", "classes": [], "channels": 1, "size": [64, 64, 64],
        "images": {"train": 60, "validation": 20, "test": 40}, "counts": {split: {"F": 5, "M": 5} for split in ("train", "validation", "test")},
        "mean": [0.5], "std": [0.2], "target_mean": 60.0, "target_std": 10.0, "target_range": [40.5, 85.0], "regions": ["wm", "gm", "csf"],
        "voxel_mm": [3.0, 3.0, 3.0], "simulated": simulated, "skipped": [], "dtype": "float16", "seed": 0, "licence": "MIT", "source": "tests",
        "files": {}, "settings": {},
    }  # fmt: skip


def limits(value: float, width: float = 0.5) -> dict[str, float]:
    return {"value": value, "low": value - width, "high": value + width}


def trained(number: int, seed: int, routed: bool) -> dict[str, Any]:
    """Test MAE 4 + method + 0.1 · seed."""
    curve = [{"step": step, "epoch": float(step), "train_loss": 9.0 / step, "train_mae": 9.0 / step, "validation_mae": 10.0 / step + number} for step in (1, 2, 3)]
    found = {
        "test_mae": limits(4 + number + 0.1 * seed), "validation_mae": 4.5, "images_per_second": 20.0, "seconds": 60.0 + seed,
        "parameters": 1000, "active_parameters": 600 if routed else 1000, "curve": curve,
    }  # fmt: skip
    return found | ({"region_routing": [{"epoch": epoch, "rows": probe(epoch)} for epoch in (1, 5, 9)]} if routed else {})


def probe(epoch: int) -> list[dict[str, Any]]:
    """The region's own expert has a share of 0.3 + 0.05 · epoch of its tokens, and 0.25 of random ones."""
    rows = []
    for region in ("wm", "gm", "csf"):
        for name, share in ((region, 0.3 + 0.05 * epoch), (f"random_{region}", 0.25)):
            rows.append({"region": name, "experts": [[region, 0.5], ["free_0", 0.25]], "share": {"wm": 0.0, "gm": 0.0, "csf": 0.0, "free_0": 1 - share} | {region: share}})
    return rows


def calibrated(number: int, seed: int) -> dict[str, Any]:
    """Raw MAE 4 + method, corrected 3.5 + method + 0.1 · seed, median predictor 10."""
    generator = np.random.default_rng(seed)
    ages = generator.uniform(45, 85, 40)
    s1 = {name: {"mae": limits(4 - cut + number + 0.1 * seed), "corr": limits(corr), "slope": limits(slope), "intercept": limits(60 - 60 * slope)}
          for name, cut, corr, slope in (("raw", 0, -0.6, 0.75), ("pooled", 0.5, -0.1, 0.95), ("sex_specific", 0.4, -0.125, 0.94))}  # fmt: skip
    groups = {f"by_{name}": [{"group": group, "n": 20, "raw": {"mae": limits(4.0)}, "pooled": {"mae": limits(3.0)}} for group in names]
              for name, names in (("sex", "FM"), ("decade", ("50–59", "60–69")), ("site", ("a",)))}  # fmt: skip
    raw = 15 + 0.75 * ages + generator.normal(0, 2, 40)
    return {
        "task": "regression", "target": "age", "unit": "years", "n_test": 40, "n_fit": 60, "fit_on": "train", "refused": None, "median_mae": 10.0,
        "age_range": [45.0, 85.0], **s1, **groups, "interval": {"level": 0.9, "radius": 7.0, "n": 20, "coverage": limits(0.9, 0.05)},
        "points": {"age": ages.tolist(), "sex": ["F", "M"] * 20, "raw": raw.tolist(), "pooled": ((raw - 15) / 0.75).tolist()},
    }  # fmt: skip


def attacked(number: int, seed: int) -> dict[str, Any]:
    rows = [{"epsilon": step / 255, "mae": 4.0 + number + step, "low": 3.0 + number + step, "high": 5.0 + number + step, "routing_change": [0.1 * step], "processing_change": [0.1]}
            for step in (0, 1, 2)]  # fmt: skip
    audit = [{"name": "deterministic model", "holds": True, "text": "two passes agree"}]
    return {"images": 40, "clean_mae": 4.0 + number, "attacks": {"pgd-10": rows, "fgsm": rows}, "worst_case": [{**row, "mae": row["mae"] + 0.5} for row in rows], "audit": audit}


def checked(number: int, seed: int) -> dict[str, Any]:
    """Isolated: wm 9, gm 8, csf 7 + 0.1 · seed, and probes 6.5, 6, 4.25 + 0.2 · seed, of the whole volume 2.75; rescans 0.5 years apart."""
    tissues = {"wm": (9.0, 6.5), "gm": (8.0, 6.0), "csf": (7.0, 4.25)}
    isolated = {name: left_alone(value + 0.1 * seed, probe + 0.2 * seed) for name, (value, probe) in tissues.items()}
    apart = {("gm", "wm"): (0.5, -0.25, 1.0), ("csf", "gm"): (1.75, 1.5, 2.25)}
    order = [{"less": less, "more": more, "difference": value, "low": low, "high": high} for (less, more), (value, low, high) in apart.items()]
    older = {"subjects": 2, "ages": [50, 60, 70], "predictions": [[52, 60, 66], [50, 58, 69]], "monotone_share": 0.75, "rank_correlation": 0.95}
    rescan = {"pairs": 9, "mean_abs_difference": 0.5, "low": 0.4, "high": 0.6, "mae": 4.0}
    return {"whole": left_alone(4.0, 2.75), "isolated": isolated, "order": order, "ageing": older, "rescan": rescan, "reasons": {}}


def left_alone(mae: float, probe: float) -> dict[str, float]:
    return {"mae": mae, "low": mae - 1, "high": mae + 1, "probe_mae": probe, "probe_low": probe - 0.5, "probe_high": probe + 0.25, "penalty": 0.1}
