"""The headline metrics of page, MLflow and terminal, and a phase's four main quantities."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from moecore.measure.robustness import Robustness
from moecore.report.column import CEILING, DENSE, Column, score_slug
from moecore.report.pictures import robustness
from moecore.report.result_types import PhaseResults
from moecore.report.tables.cells import Cell, Cells, NumberFormat
from moecore.report.tables.metrics_by_method import ComparisonTable
from moecore.statistics.intervals import Interval


class HeadlineMetric(NamedTuple):
    name: str  # a key of compare.json
    slug: str = ""  # name in MLflow; metrics with one are in the first table of a phase
    run: bool = False  # in the file of a run
    terminal: bool = False  # in the summary on the terminal


TISSUES = ("wm", "gm", "csf")  # in their order in the first table
HEADLINES = (
    HeadlineMetric("test_accuracy", slug="acc", run=True, terminal=True),
    HeadlineMetric("test_mae", slug="mae", run=True, terminal=True),
    HeadlineMetric("ppl", slug="ppl", run=True, terminal=True),
    HeadlineMetric("test_nats", slug="nats", run=True),
    HeadlineMetric("swapped_ppl_15", terminal=True),
    HeadlineMetric("median_mae", slug="mmae"),
    HeadlineMetric("mae_of_median", slug="rmae", terminal=True),
    HeadlineMetric("mae_pooled", slug="pool", run=True, terminal=True),
    HeadlineMetric("ece_after", slug="ece", run=True, terminal=True),
    *(HeadlineMetric(f"isolated_{name}", slug=name, terminal=True) for name in TISSUES),
    *(HeadlineMetric(f"probe_{name}", slug=f"p{name}", terminal=True) for name in TISSUES),
    HeadlineMetric("own_expert_gain", slug="gain", run=True, terminal=True),
    HeadlineMetric("monotone", slug="mono", terminal=True),
    HeadlineMetric("rescan", slug="scan", terminal=True),
    HeadlineMetric("mce", slug="mce", run=True),
    HeadlineMetric("noise_selection_change", run=True),
    HeadlineMetric("match_top1", slug="top1", run=True),
    HeadlineMetric("imed", run=True),
    HeadlineMetric("swapped_change_1_5", run=True),
    HeadlineMetric("load_cv2", slug="cv2", run=True, terminal=True),
    HeadlineMetric("entropy", run=True, terminal=True),
    HeadlineMetric("active_parameters", slug="size", run=True, terminal=True),
    HeadlineMetric("latency_ms", slug="ms", run=True),
    HeadlineMetric("images_per_second", terminal=True),
)
PANEL_TITLES = {  # start of a column's name → title in the overview
    "routing_change": "Routing: overlap\nunder attack",
    "swapped_change": "Routing: overlap,\nwords swapped",
    "noise_selection_change": "Routing: overlap\nunder noise",
    "match_top1": "Routing: match of\ntwo views",
    "agreement_with_final": "Routing: agreement\nwith the end",
    "active_parameters": "Cost: million\nactive parameters",
    "gflops": "Cost: million\nFLOPs an input",
}
STEADINESS_PHRASES = {  # of routing without attacks and swapped words, in order of preference
    "noise_selection_change": "under noise routing overlap is {}",
    "match_top1": "two views of an image share {} of the first experts",
    "agreement_with_final": "{} of the first experts are settled halfway through training",
}
SWAPPED_PREFIX = "swapped_change_"
CHANGE_PREFIXES = ("routing_change_", SWAPPED_PREFIX, "noise_selection_change")  # 1 − steadiness
SCORE_PHRASES = ("on clean test data", "under the worst attack", "under attack")


class QuantityByMethod(NamedTuple):
    """One main quantity of a phase, such as the score, with a table cell per method."""

    phrase: str  # within a sentence, in which {} stands for the values of steadiness
    column: Column
    cells: Mapping[str, Cell]
    unit: str = ""
    remains: bool = False  # whether 1 − value is shown, for changes

    @property
    def format(self) -> NumberFormat:
        return NumberFormat.of(self.column.form, map(self.interval, self.cells))

    @property
    def leader(self) -> str | None:
        """The method that is significantly better than all others; None if there is none."""
        return next((method for method, cell in self.cells.items() if cell.leads), None)

    def interval(self, method: str) -> Interval:
        interval = self.cells[method].interval
        if not self.remains:
            return interval
        return Interval(1 - interval.value, *(1 - limit for limit in (interval.limits or ())[::-1]))

    @property
    def floor_and_ceiling(self) -> dict[str, Interval]:
        """The scores of dense and of true routing ("told"), if both were trained; else {}."""
        if self.phrase not in SCORE_PHRASES or not {DENSE, CEILING} <= set(self.cells):
            return {}
        return {method: self.interval(method) for method in (DENSE, CEILING)}

    def extremes(self) -> tuple[str, str]:
        """Return the methods with the smallest and with the largest value, without ``told``."""
        methods = [method for method in self.cells if method != CEILING] or self.cells
        values = {method: self.interval(method).value for method in methods}
        return min(values, key=values.__getitem__), max(values, key=values.__getitem__)


class PhaseQuantities(NamedTuple):
    score: QuantityByMethod | None
    attacked: QuantityByMethod | None
    steady: QuantityByMethod | None
    cost: QuantityByMethod | None


def choose_main_quantities(
    phase: PhaseResults, compared: ComparisonTable, controls: Collection[str] = ()
) -> PhaseQuantities:
    """Return a phase's score, score under attack, routing steadiness and cost by method.

    controls: methods with shuffled labels or unlearned routing; left out, except ``told``.
    """
    columns = {metric.name: metric for metric in compared.metrics}
    left_out = set(controls) - {CEILING}
    cells = {method: row for method, row in compared.cells.items() if method not in left_out}

    def choose(phrases: Mapping[str, str]) -> QuantityByMethod | None:
        """Return the first quantity with values among ``phrases`` (column → its words), or None."""
        for name, phrase in phrases.items():
            having = cells_by_method(name, cells or compared.cells) if name in columns else {}
            if having:
                column = columns[name]
                remains = name.startswith(CHANGE_PREFIXES)
                if remains:
                    column = column._replace(form="share")
                unit = phase.task.score.unit if phrase in SCORE_PHRASES else ""
                return QuantityByMethod(phrase, column, having, unit, remains)
        return None

    attacked, moved = choose_attack_and_change_columns(phase)
    steady = {}
    if moved:
        steady[moved] = "under attack routing overlap is {}"
    swaps = [name for name in columns if name.startswith(SWAPPED_PREFIX)]
    if swaps:  # the last swaps the most words
        part = columns[swaps[-1]].label.rpartition(", ")[2].removesuffix(" swapped")
        steady[swaps[-1]] = f"with {part} swapped routing overlap is {{}}"
    phrase = SCORE_PHRASES[1] if attacked.endswith(robustness.WORST_CASE) else SCORE_PHRASES[2]
    return PhaseQuantities(
        choose({f"test_{score_slug(phase.task.score)}": SCORE_PHRASES[0]}),
        choose({attacked: phrase}),
        choose(steady | STEADINESS_PHRASES),
        choose({"gflops": "GFLOPs", "active_parameters": "active parameters"}),
    )


def cells_by_method(name: str, cells: Cells) -> dict[str, Cell]:
    return {method: cell for method, row in cells.items() if (cell := row[name]) is not None}


def choose_attack_and_change_columns(phase: PhaseResults) -> tuple[str, str]:
    """Return the columns of score under attack and routing change; ("", "") without attacks."""
    # The score is of the worst case, if measured, else of the last attack; the change of the last.
    attack = choose_headline_attack(phase)
    if not attack:
        return "", ""
    score = robustness.attacked_score_column(score_slug(phase.task.score), attack)
    changed = robustness.names_of_attacks(phase, "routing_change") or [attack]
    return score, f"routing_change_{changed[-1]}"


def choose_headline_attack(phase: PhaseResults) -> str:
    """Return the attack of the headline: the worst case if measured, else the last; "" if none."""
    names = robustness.names_of_attacks(phase)
    if names and any(result.all("worst") for result in phase.results(Robustness)):
        return robustness.WORST_CASE
    return next(reversed(names), "")


def first_table_mlflow_names(phase: PhaseResults, columns: Collection[str]) -> dict[str, str]:
    """Return column → name in MLflow, for the columns of a phase's first table."""
    # For attacks: the worst case, if measured, else the last attack. For swapped words: the last
    # column of each kind, with the most words swapped.
    score, moved = choose_attack_and_change_columns(phase)
    attack = choose_headline_attack(phase)
    attacked = {"worst" if attack == robustness.WORST_CASE else attack.partition("-")[0][:4]: score}
    if phase.task.score.form == "share":
        attacked["move"] = moved
    swaps = {}
    for name in columns if phase.task.long else ():
        if name.startswith(("swapped_ppl", SWAPPED_PREFIX)):
            swaps["swap" if "ppl" in name else "turn"] = name
    first = [(headline.slug, headline.name) for headline in HEADLINES if headline.slug]
    place = first.index(("wm", "isolated_wm"))
    first[place:place] = (swaps | attacked).items()
    return {name: slug for slug, name in first if name in columns}
