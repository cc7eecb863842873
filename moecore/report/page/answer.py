"""The page's title answered in a sentence or two, from the numbers and what was shown of them.

A difference is told only where the tests behind the tables' marks show one.
"""

from collections.abc import Collection, Iterable, Sequence

from moecore.report.claims.claims_table import ANSWERS
from moecore.report.claims.evaluation import Evaluated, claims_of, questions_of
from moecore.report.measured import Phase
from moecore.report.quantities import Quantities, Quantity
from moecore.report.references import has_routing
from moecore.report.tables.number_format import keep_percent_on_line

VERDICTS = {
    "holds": ("holds", "hold"),
    "differs": ("comes out otherwise here", "come out otherwise here"),
    "open": ("stays open", "stay open"),
}
NAMED = 3  # claims of a verdict that are named; of more only their number is told
SCORES = {
    "share": ("is significantly more accurate", "is most accurate", "is as accurate as"),
    "error": ("errs significantly less", "errs least", "errs as little as"),
}


def describe_phase(phase: Phase, title: str, quantities: Quantities, dense: Collection[str]) -> str:
    """Return what is known of the methods of a phase, in few sentences after its title."""
    several = len(quantities.score.cells if quantities.score else phase.models) > 1
    parts = [_routing(phase, quantities)]
    parts += _scores(quantities, dense, phase.seeds == 1) if several else _alone(quantities)
    return keep_percent_on_line(f"{title}: {'. '.join(parts)}.")


def answer_of_claims(evaluated: Sequence[Evaluated]) -> str:
    """How many claims of the papers hold, and which; of questions how many have an answer."""
    told = []
    if claims := claims_of(evaluated):
        told.append(_judged(claims))
    if questions := questions_of(evaluated):
        told.append(_asked(questions))
    return keep_percent_on_line(" ".join(told))


def _asked(questions: Sequence[Evaluated]) -> str:
    """Of 3 questions that no paper answers: 1 yes, 2 open."""
    words = [ANSWERS.get(question.verdict, question.verdict) for question in questions]
    counts = [f"{words.count(word)} {word}" for word in dict.fromkeys(words)]
    if len(questions) == 1:
        return f"One question that no paper answers: {words[0]}."
    return f"Of {len(questions)} questions that no paper answers: {', '.join(counts)}."


def _judged(evaluated: Sequence[Evaluated]) -> str:
    """The claims by their verdicts."""
    by_verdict = {
        name: [claim for claim in evaluated if claim.verdict == name] for name in VERDICTS
    }
    parts = []
    for name, claims in by_verdict.items():
        if claims:
            one, many = VERDICTS[name]
            verb = one if len(claims) == 1 else many
            parts.append(f"{len(claims)} {verb}{_which(claims)}")
    return _all(parts, len(evaluated)) + _after_holm(evaluated)


def _after_holm(evaluated: Sequence[Evaluated]) -> str:
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


def _all(parts: Sequence[str], number: int) -> str:
    """The sentence around the verdicts."""
    if number == 1:
        return f"The one claim that was tested here {parts[0].removeprefix('1 ')}."
    return f"Of {number} claims that were tested here, {'; '.join(parts)}."


def _which(claims: Sequence[Evaluated]) -> str:
    """In brackets, what few claims are of."""
    if len(claims) > NAMED:
        return ""
    words = [
        f"{one.claim.method} against {one.claim.against}: {one.metric.column.label}"
        for one in claims
    ]
    return f" ({'; '.join(dict.fromkeys(words))})"


def _routing(phase: Phase, quantities: Quantities) -> str:
    """Who decides, and how steadily."""
    steady = quantities.steady
    if steady is None:
        if not has_routing(phase.models):
            return "nobody decides, as a dense model sends every token through the same weights"
        return "the router decides, and how steadily was not measured"
    if len(steady.cells) == 1:
        return steady.told(leader_value(steady, next(iter(steady.cells))))
    if leader := steady.leader:
        return (
            f"the router of {leader} is the steadiest: {steady.told(leader_value(steady, leader))}"
        )
    return steady.told(value_span(steady))


def _scores(quantities: Quantities, dense: Collection[str], one_seed: bool) -> list[str]:
    """Whether a method is ahead on clean data, and under attack."""
    both = [
        quantity for quantity in (quantities.score, quantities.attacked) if quantity is not None
    ]
    if len(both) == 2 and all(quantity.leader is None for quantity in both):
        tie = f"no method {_words(both[0])[0]}, clean or attacked"
        return [f"With one seed {tie}" if one_seed else tie.capitalize()]
    return [_score(quantity, dense) for quantity in both]


def _score(quantity: Quantity, dense: Collection[str]) -> str:
    """Who is ahead, if anybody is shown to be."""
    better, best, as_good = _words(quantity)
    leader = quantity.leader
    where = quantity.words
    if leader is None:
        ends = _with_unit(quantity, value_span(quantity))
        return f"{where.capitalize()} no method {better}: {ends}"
    measured = _with_unit(quantity, leader_value(quantity, leader))
    if leader in dense:
        return f"{where.capitalize()} no mixture {as_good} {leader}, {measured}"
    return f"{leader} {best} {where}, {measured}"


def _alone(quantities: Quantities) -> Iterable[str]:
    """The scores of the only method."""
    for quantity in (quantities.score, quantities.attacked):
        if quantity is not None:
            method = next(iter(quantity.cells))
            measured = _with_unit(quantity, leader_value(quantity, method))
            told = "has {} right" if quantity.column.form == "share" else "errs by {}"
            yield f"{method} {told.format(measured)} {quantity.words}"


def _words(quantity: Quantity) -> tuple[str, str, str]:
    """More accurate, most accurate, as accurate as; of errors closer."""
    return SCORES["share" if quantity.column.form == "share" else "error"]


def _with_unit(quantity: Quantity, text: str) -> str:
    """An error has its unit."""
    return f"{text} {quantity.unit}" if quantity.unit else text


def leader_value(quantity: Quantity, method: str) -> str:
    """79.1 % (76.0 – 82.2)."""
    return quantity.format.value_with_limits(quantity.interval(method), "()")


def value_span(quantity: Quantity) -> str:
    """Return 55.0 to 79.1 %; where they are printed alike, 55.0 %."""
    low, high = (
        quantity.format.value(quantity.interval(method).value) for method in quantity.ends()
    )
    return low if low == high else f"{low.removesuffix(' %')} to {high}"
