"""The page's title answered in a sentence or two, from the numbers and what was shown of them.

A difference is told only where the tests behind the tables' marks show one.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from moecore.report.claims.claims_table import ANSWERS
from moecore.report.claims.evaluation import EvaluatedClaim, drop_questions, keep_questions
from moecore.report.column import has_moe_method
from moecore.report.headline_quantities import PhaseQuantities, QuantityByMethod
from moecore.report.tables.number_format import keep_percent_on_line
from moecore.report.typed_results import Phase, list_without_none

VERDICTS = {
    "holds": ("holds", "hold"),
    "differs": ("comes out otherwise here", "come out otherwise here"),
    "open": ("stays open", "stay open"),
}
NAMED = 3  # claims of a verdict that are named; of more only their number is told
SCORES = {"share": ("is significantly more accurate", "is most accurate", "is as accurate as")}
ERRORS = ("errs significantly less", "errs least", "errs as little as")


def describe_phase_findings(
    phase: Phase, title: str, quantities: PhaseQuantities, dense: Collection[str]
) -> str:
    """Return what is known of the methods of a phase, in few sentences after its title."""
    several = len(quantities.score.cells if quantities.score else phase.models) > 1
    parts = [_routing(phase, quantities)]
    parts += _scores(quantities, dense, phase.seeds == 1) if several else _alone(quantities)
    return keep_percent_on_line(f"{title}: {'. '.join(parts)}.")


def describe_claims(evaluated: Sequence[EvaluatedClaim]) -> str:
    """How many claims of the papers hold, and which; of questions how many have an answer."""
    claims = drop_questions(evaluated)
    questions = keep_questions(evaluated)
    told = []
    if claims:
        told.append(_judged(claims))
    if questions:
        told.append(_asked(questions))
    return keep_percent_on_line(" ".join(told))


def _asked(questions: Sequence[EvaluatedClaim]) -> str:
    """Of 3 questions that no paper answers: 1 yes, 2 open."""
    words = Counter(ANSWERS.get(question.verdict, question.verdict) for question in questions)
    if len(questions) == 1:
        return f"One question that no paper answers: {next(iter(words))}."
    counts = ", ".join(f"{count} {word}" for word, count in words.items())
    return f"Of {len(questions)} questions that no paper answers: {counts}."


def _judged(evaluated: Sequence[EvaluatedClaim]) -> str:
    parts = []
    for name, (one, many) in VERDICTS.items():
        if claims := [claim for claim in evaluated if claim.verdict == name]:
            verb = one if len(claims) == 1 else many
            parts.append(f"{len(claims)} {verb}{_which(claims)}")
    if len(evaluated) == 1:
        told = f"The one claim that was tested here {parts[0].removeprefix('1 ')}."
    else:
        told = f"Of {len(evaluated)} claims that were tested here, {'; '.join(parts)}."
    return told + _after_holm(evaluated)


def _after_holm(evaluated: Sequence[EvaluatedClaim]) -> str:
    """How many verdicts Holm's correction leaves, where it takes any away."""
    decided = [claim for claim in evaluated if claim.verdict != "open"]
    left = [claim for claim in decided if claim.verdict_holm != "open"]
    if len(left) == len(decided):
        return ""
    verb = "stands" if len(left) == 1 else "stand"
    return (
        f" After Holm's correction within each paper {len(left)} of {len(decided)} "
        f"decided ones {verb}."
    )


def _which(claims: Sequence[EvaluatedClaim]) -> str:
    """In brackets, what few claims are of."""
    if len(claims) > NAMED:
        return ""
    words = [
        f"{one.claim.method} against {one.claim.against}: {one.metric.label}" for one in claims
    ]
    return f" ({'; '.join(dict.fromkeys(words))})"


def _routing(phase: Phase, quantities: PhaseQuantities) -> str:
    """Who decides, and how steadily."""
    steady = quantities.steady
    if steady is None:
        if not has_moe_method(phase.models):
            return "nobody decides, as a dense model sends every token through the same weights"
        return "the router decides, and how steadily was not measured"
    if len(steady.cells) == 1:
        return steady.told(format_method_value(steady, next(iter(steady.cells))))
    if leader := steady.leader:
        value = steady.told(format_method_value(steady, leader))
        return f"the router of {leader} is the steadiest: {value}"
    return steady.told(format_value_range(steady))


def _scores(quantities: PhaseQuantities, dense: Collection[str], one_seed: bool) -> list[str]:
    both = list_without_none((quantities.score, quantities.attacked))
    if len(both) == 2 and all(quantity.leader is None for quantity in both):
        tie = f"no method {SCORES.get(both[0].column.form, ERRORS)[0]}, clean or attacked"
        return [f"With one seed {tie}" if one_seed else tie.capitalize()]
    return [_score(quantity, dense) for quantity in both]


def _score(quantity: QuantityByMethod, dense: Collection[str]) -> str:
    """Who is ahead, if anybody is shown to be."""
    better, best, as_good = SCORES.get(quantity.column.form, ERRORS)
    leader = quantity.leader
    where = quantity.words
    if leader is None:
        return f"{where.capitalize()} no method {better}: {format_value_range(quantity)}"
    measured = format_method_value(quantity, leader)
    if leader in dense:
        return f"{where.capitalize()} no mixture {as_good} {leader}, {measured}"
    return f"{leader} {best} {where}, {measured}"


def _alone(quantities: PhaseQuantities) -> Iterable[str]:
    for quantity in list_without_none((quantities.score, quantities.attacked)):
        method = next(iter(quantity.cells))
        measured = format_method_value(quantity, method)
        told = {"share": "has {} right"}.get(quantity.column.form, "errs by {}")
        yield f"{method} {told.format(measured)} {quantity.words}"


def format_method_value(quantity: QuantityByMethod, method: str) -> str:
    """79.1 % (76.0 – 82.2); an error has its unit."""
    text = quantity.format.value_with_limits(quantity.interval(method), "()")
    return f"{text} {quantity.unit}".rstrip()


def format_value_range(quantity: QuantityByMethod) -> str:
    """Return 55.0 to 79.1 %; where they are printed alike, 55.0 %; an error has its unit."""
    low, high = (
        quantity.format.value(quantity.interval(method).value) for method in quantity.ends()
    )
    span = low if low == high else f"{low.removesuffix(' %')} to {high}"
    return f"{span} {quantity.unit}".rstrip()
