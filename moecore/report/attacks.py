"""Which lines of the attacks' self-audit hold, method by method."""

from collections.abc import Iterable, Mapping, Sequence

from moecore.measure.under_attack.line import Line as Audited
from moecore.report.view import NONE, Block, Grid, Item, Line
from moecore.report.words import with_named_epsilons

MARKS = {True: "✓ holds", False: "✗ does not hold", None: "– not judged"}
LOOKS = {True: "verdict holds", False: "verdict contradicted", None: "verdict open"}
WORST_FIRST = (False, None, True)


def audit(lines: Mapping[str, Sequence[Sequence[Audited]]]) -> Block:
    """A row a question; lines: method → seed → the audit."""
    by_question = {
        method: [{line.name: line for line in found} for found in seeds]
        for method, seeds in lines.items()
    }
    every = [found for seeds in by_question.values() for found in seeds]
    names = dict.fromkeys(name for found in every for name in found)
    rows = [
        Line(
            Item(name.replace("_", " ")),
            [
                answer([found[name] for found in seeds if name in found])
                for seeds in by_question.values()
            ],
        )
        for name in names
    ]
    grids = [Grid(["Question", *lines], rows)] if rows else []
    title = "Can the attacks be believed?"
    return Block(title, grids=grids, folded=True, finding=tally(every))


def answer(found: Sequence[Audited]) -> Item:
    """What all seeds say of a question: the worst verdict, with its words."""
    if not found:
        return NONE
    worst = min(found, key=lambda line: WORST_FIRST.index(line.holds))
    return Item(
        MARKS[worst.holds],
        note=with_named_epsilons(worst.text.removeprefix("not judged: ")),
        look=LOOKS[worst.holds],
    )


def tally(every: Iterable[Mapping[str, Audited]]) -> str:
    """How many of the questions that could be told hold."""
    verdicts = [line.holds for found in every for line in found.values()]
    told = len(verdicts) - verdicts.count(None)
    return f"{verdicts.count(True)} of {told} lines of the audit hold"
