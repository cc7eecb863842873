"""The metrics of models whose answer is an age: errors, table S1 of ERMoE's supplement, regions and their experts, ageing and rescans.

Numbers are in the target's unit (years). A study without ages has none of these columns.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moecore.evaluation.intervals import Interval
from moecore.report.metric import Metric, Reader, mean, value_of
from moecore.report.metrics_adversarial import WORST, attack_rows, attack_title, attacks_of, strongest
from moecore.report.results import Measured

REGIONS = ("wm", "gm", "csf")
ORDER = {("gm", "csf"): "grey matter alone than on fluid alone", ("wm", "gm"): "white matter alone than on grey matter alone"}  # (more, less)
ERRS = "years by which the probe errs more on"
PROBE = "a linear probe: a new linear head, fitted on such volumes of the training split, reads age from a model that stays as it is"
TABLE_S1 = {"raw": "as predicted", "pooled": "corrected", "sex_specific": "corrected per sex"}


def of_ages(measured: Sequence[Measured]) -> bool:
    """Whether these models answer with a real number."""
    return any("test_mae" in model.trained for model in measured)


def age_errors() -> list[Metric]:
    """What stands first: the error of the models as trained, beside the median predictor's, and corrected."""
    constant, ratio = "of always answering with the median age of training", "test MAE / the median predictor's; below 0.5 is less than half its error"
    return [
        Metric("test_mae", "Test MAE, years", lambda m: value_of(m.trained["test_mae"]), "lower", "number", "mean |predicted − known age|"),
        Metric("median_mae", "Median predictor's MAE", lambda m: m.calibrate.get("median_mae"), "", "number", constant),
        Metric("mae_of_median", "MAE / median predictor's", _of_median, "lower", "number", ratio),
        Metric("mae_pooled", "MAE, corrected", _s1("pooled", "mae"), "lower", "number", "one line for all, (ŷ − a)/b"),
        Metric("parameters", "Parameters", lambda m: m.trained["parameters"], "", "count"),
        Metric("active_parameters", "Active parameters", lambda m: m.trained["active_parameters"], "", "count", "used for one token"),
        Metric("images_per_second", "Volumes / s", lambda m: m.trained["images_per_second"], "", "count", "while training"),
        Metric("seconds", "Training time", lambda m: m.trained["seconds"], "", "seconds"),
    ]


def table_s1() -> list[Metric]:
    """Correlation, slope and intercept of every kind of prediction, and the MAE per sex; slopes and intercepts in the full table only."""
    found = [Metric("mae_sex_specific", "MAE, corrected per sex", _s1("sex_specific", "mae"), "lower", "number", "a line for each sex", "ages")]
    for name, words in TABLE_S1.items():
        found.append(Metric(f"corr_{name}", f"Corr., {words}", _s1(name, "corr"), "", "number", "of the error with age; 0 is no leaning", "ages"))
    for name, words in TABLE_S1.items():
        for key in ("slope", "intercept"):
            found.append(Metric(f"{key}_{name}", f"{key.title()}, {words}", _s1(name, key), "", "number", "of predicted on known age", "ages", detail=True))
    coverage = "share of the test volumes inside the 90 % interval of a single prediction"
    return [
        *found,
        Metric("interval_radius", "90 % interval, ± years", _interval("radius"), "lower", "number", "split conformal, of a single prediction", "ages"),
        Metric("interval_coverage", "Interval's coverage", _interval("coverage"), "", "share", coverage, "ages", limits="wilson", detail=True),
    ]


def regions_and_checks() -> list[Metric]:
    """Errors with one tissue left, what region experts do, and whether predictions follow age and ignore the scan."""
    left = "MAE in years where only this tissue is left of a volume"
    probed = f"{left}, of {PROBE}; a model may be far off on such volumes, and still know much of age from them"
    own, control = "tokens of a region that choose the expert of that region, mean over wm, gm, csf", "the same share under random masks of that size"
    rises = "steps from one age to the next in which the prediction for the same simulated subject rises"
    return [
        *(Metric(f"isolated_{r}", f"MAE, {r.upper()} alone", _isolated(r, ""), "lower", "number", left, "ages") for r in REGIONS),
        *(Metric(f"probe_{r}", f"MAE, {r.upper()} alone, probe", _isolated(r, "probe_"), "lower", "number", probed, "ages") for r in REGIONS),
        *(Metric(f"{a}_over_{b}", f"{a.upper()} − {b.upper()}, probe", _over(a, b), "", "number", f"{ERRS} {words}", "ages") for (a, b), words in ORDER.items()),
        Metric("own_expert", "Own expert", own_expert(""), "higher", "share", own, "ages"),
        Metric("own_expert_random", "Own expert, random masks", own_expert("random_"), "", "share", control, "ages"),
        Metric("own_expert_gain", "Own expert − random", _gain, "higher", "number", "above 0: experts know their tissue", "ages"),
        Metric("monotone", "Ageing, rising steps", _checked("ageing", "monotone_share"), "higher", "share", rises, "ages"),
        Metric("ageing_rank", "Ageing, rank correlation", _checked("ageing", "rank_correlation"), "higher", "number", "of age and prediction", "ages"),
        Metric("rescan", "Rescan, years apart", _rescan, "lower", "number", "mean |difference| of two scans of one subject", "ages"),
    ]


def attacked_ages(measured: Sequence[Measured]) -> list[Metric]:
    """The error under each attack, and under the worst of them for each volume, at the largest epsilon."""
    names = [*attacks_of(measured), *([WORST] if any(attack_rows(model, WORST) for model in measured) else [])]
    found = []
    for name in names:
        title, note = (attack_title(name), "mean error under attack") if name != WORST else ("worst case", "largest error of each volume over all attacks")
        found.append(Metric(f"attacked_mae_{name}", f"MAE, {title}, ε = {strongest(measured, name)}", _under(name), "lower", "number", note, "adversarial"))
    return found


def own_expert(prefix: str) -> Reader:
    """Mean share of a region's tokens that choose the expert of the same name, at the last epoch; None where no expert has a region's name.

    prefix: "" for the regions themselves, "random_" for random masks of their size.
    """

    def read(m: Measured) -> float | None:
        shares = {row["region"]: row["share"] for row in last_probe(m)}
        return mean([shares[prefix + region][region] for region in REGIONS if region in shares.get(prefix + region, {})])

    return read


def last_probe(m: Measured) -> list[Mapping[str, Any]]:
    """The rows of the region-routing probe at the last epoch; [] where there is none."""
    probes = m.trained.get("region_routing") or []
    return max(probes, key=lambda probe: probe["epoch"])["rows"] if probes else []


def known(stored: Any) -> Any:
    """A stored {value, low, high} as an Interval, None where its value is unknown."""
    found = value_of(stored)
    return None if isinstance(found, Interval) and found.value is None else found


def probe_order(found: Mapping[str, Any], more: str, less: str) -> Interval | None:
    """Years by which the probe errs more on one tissue alone than on another, of a model's cohort checks; None where a tissue is missing."""
    row = {(row["more"], row["less"]): row for row in found.get("order") or []}.get((more, less))
    return Interval(row["difference"], row["low"], row["high"]) if row else None


def _s1(name: str, key: str) -> Reader:
    def read(m: Measured) -> Any:
        found = m.calibrate.get(name)
        return known(found[key]) if found else None

    return read


def _of_median(m: Measured) -> float | None:
    constant = m.calibrate.get("median_mae")
    return value_of(m.trained["test_mae"]).value / constant if constant else None


def _interval(key: str) -> Reader:
    return lambda m: known(m.calibrate["interval"][key]) if m.calibrate else None


def _isolated(region: str, prefix: str) -> Reader:
    def read(m: Measured) -> Interval | None:
        found = (m.cohort_checks.get("isolated") or {}).get(region)
        return Interval(*(found.get(f"{prefix}{name}") for name in ("mae", "low", "high"))) if found and f"{prefix}mae" in found else None

    return read


def _over(more: str, less: str) -> Reader:
    return lambda m: probe_order(m.cohort_checks, more, less)


def _gain(m: Measured) -> float | None:
    own, control = own_expert("")(m), own_expert("random_")(m)
    return None if own is None or control is None else own - control


def _checked(name: str, key: str) -> Reader:
    return lambda m: (m.cohort_checks.get(name) or {}).get(key)


def _rescan(m: Measured) -> Interval | None:
    found = m.cohort_checks.get("rescan")
    return Interval(found["mean_abs_difference"], found.get("low"), found.get("high")) if found else None


def _under(attack: str) -> Reader:
    def read(m: Measured) -> Interval | None:
        rows = attack_rows(m, attack)
        return Interval(rows[-1]["mae"], rows[-1]["low"], rows[-1]["high"]) if rows else None

    return read
