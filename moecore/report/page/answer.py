"""The page's title answered in one sentence, from the numbers and what was shown of them.

A difference is told only where the tests behind the tables' marks show one.
"""

from collections.abc import Collection, Iterable, Sequence

from moecore.report.claims.claim_row import ANSWERS
from moecore.report.claims.evaluation import Evaluated, claims_of, questions_of
from moecore.report.measured import Phase
from moecore.report.quantities import Quantities, Quantity
from moecore.report.references import routed
from moecore.report.tables.number_format import keep_percent_on_line

VERDICTS = {
    "holds": ("holds", "hold"),
    "differs": ("comes out otherwise here", "come out otherwise here"),
    "open": ("stays open", "stay open"),
}
NAMED = 3  # claims of a verdict that are named; of more only their number is told
SCORES = {
    "share": ("is shown to be more accurate than", "is most accurate", "is as accurate as"),
    "error": ("is shown to err less than", "errs least", "errs as little as"),
}


def answer(phase: Phase, title: str, found: Quantities, dense: Collection[str]) -> str:
    """One sentence on the methods of a phase, whose title it begins with."""
    several = len(found.score.cells if found.score else phase.models) > 1
    parts = [_routing(phase, found)]
    parts += _scores(found, dense) if several else _alone(found)
    return keep_percent_on_line(f"{title}: {'; '.join(parts)}.")


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
    words = [ANSWERS.get(found.verdict, found.verdict) for found in questions]
    counts = [f"{words.count(word)} {word}" for word in dict.fromkeys(words)]
    if len(questions) == 1:
        return f"One question that no paper answers: {words[0]}."
    return f"Of {len(questions)} questions that no paper answers: {', '.join(counts)}."


def _judged(evaluated: Sequence[Evaluated]) -> str:
    """The claims by their verdicts."""
    by_verdict = {
        name: [found for found in evaluated if found.verdict == name] for name in VERDICTS
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
    decided = [found for found in evaluated if found.verdict != "open"]
    left = [found for found in decided if found.verdict_holm != "open"]
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
        f"{found.claim.method} against {found.claim.against}: {found.metric.column.label}"
        for found in claims
    ]
    return f" ({'; '.join(dict.fromkeys(words))})"


def _routing(phase: Phase, found: Quantities) -> str:
    """Who decides, and how steadily."""
    steady = found.steady
    if steady is None:
        if not routed(phase.models):
            return "nobody decides, as a dense model sends every token through the same weights"
        return "the router decides, and how steadily was not measured"
    if len(steady.cells) == 1:
        method = next(iter(steady.cells))
        return f"the router of {method} decides, and {steady.told(value(steady, method))}"
    leader = steady.leader
    if leader:
        told = steady.told(value(steady, leader))
        return f"the router of {leader} decides most steadily, as {told}"
    told = steady.told(span(steady))
    if " to " not in span(steady):
        return f"each router decides, and {told}"
    if steady.told_apart:
        return f"each router decides, none shown to be steadier than {_others(steady)}: {told}"
    return f"each router decides, and {told}, a difference that one seed cannot show"


def _scores(found: Quantities, dense: Collection[str]) -> list[str]:
    """Whether a method is ahead on clean data, and under attack."""
    both = [quantity for quantity in (found.score, found.attacked) if quantity is not None]
    if len(both) == 2 and all(quantity.leader is None for quantity in both):
        clean, attacked = (f"{one.words}, {_with_unit(one, span(one))}" for one in both)
        tie = f"no method {_words(both[0])[0]} {_others(both[0])}"
        return [f"{tie}, neither {clean}, nor {attacked}"]
    return [_score(quantity, dense) for quantity in both]


def _score(quantity: Quantity, dense: Collection[str]) -> str:
    """Who is ahead, if anybody is shown to be."""
    better, best, as_good = _words(quantity)
    leader = quantity.leader
    where = quantity.words
    if leader is None:
        ends = _with_unit(quantity, span(quantity))
        return f"{where} no method {better} {_others(quantity)}, {ends}"
    measured = _with_unit(quantity, value(quantity, leader))
    if leader in dense:
        return f"{where} no mixture {as_good} {leader}, {measured}"
    return f"{leader} {best} {where}, {measured}"


def _alone(found: Quantities) -> Iterable[str]:
    """The scores of the only method."""
    for quantity in (found.score, found.attacked):
        if quantity is not None:
            method = next(iter(quantity.cells))
            measured = _with_unit(quantity, value(quantity, method))
            told = "has {} right" if quantity.column.form == "share" else "errs by {}"
            yield f"{method} {told.format(measured)} {quantity.words}"


def _words(quantity: Quantity) -> tuple[str, str, str]:
    """More accurate, most accurate, as accurate as; of errors closer."""
    return SCORES["share" if quantity.column.form == "share" else "error"]


def _others(quantity: Quantity) -> str:
    return "the other" if len(quantity.cells) == 2 else "every other"


def _with_unit(quantity: Quantity, text: str) -> str:
    """An error has its unit."""
    return f"{text} {quantity.unit}" if quantity.unit else text


def value(quantity: Quantity, method: str) -> str:
    """79.1 % (76.0 – 82.2)."""
    return quantity.format.value_with_limits(quantity.interval(method), "()")


def span(quantity: Quantity) -> str:
    """55.0 % (ermoe) to 79.1 % (prc); where they are printed alike, 55.0 % (all alike)."""
    least, most = quantity.ends()
    low, high = (quantity.format.value(quantity.interval(method).value) for method in (least, most))
    if low == high:
        return f"{low} (all alike)"
    return f"{low} ({least}) to {high} ({most})"
