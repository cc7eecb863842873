"""The report: one HTML file that needs nothing else, light or dark, readable on a phone.

What it shows is built here, as the objects of ``view``; the templates lay it out.
"""

from collections.abc import Sequence
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from moecore.measure.linear_experts import Result as LinearExperts
from moecore.report import pictures
from moecore.report.by_paper import by_paper
from moecore.report.cards import card_facts
from moecore.report.claims import Evaluated
from moecore.report.headline import headline
from moecore.report.measured import Phase, Results
from moecore.report.measures import SHOWN, linear_experts, transfer
from moecore.report.rows import by_method, by_metric
from moecore.report.shown import Shown
from moecore.report.significance import WORDS
from moecore.report.tables import Table, table, used_tests
from moecore.report.verdicts import claims_section
from moecore.report.view import Block, Grid, Page, Picture, Section, without_empty

TITLES = {
    "pretrain": "Pretrained",
    "finetune": "Fine-tuned",
    "adversarial": "Adversarially fine-tuned",
}
KINDS = {
    "t": "Student's t over seeds",
    "wilson": "Wilson for shares",
    "bootstrap": "bootstrap over test images for means",
}
CONTROL = (
    "such a method learned from labels dealt out anew, and an answer that never changes is robust "
    "without knowing anything"
)


def page(results: Results, evaluated: Sequence[Evaluated] = ()) -> str:
    """The whole page; the same results give the same text.

    Raises UserError where results do not fit together.
    """
    return environment().get_template("page.html.jinja").render(page=page_of(results, evaluated))


def page_of(results: Results, evaluated: Sequence[Evaluated]) -> Page:
    """All that the page says."""
    sections = []
    if evaluated:
        sections.append(claims_section(evaluated))
    sections += [section_of(results, phase) for phase in results.phases.values()]
    if found := results.alone.get(LinearExperts):
        blocks = list(linear_experts.section(found))
        sections.append(Section("linear_experts", "Linear experts", "Linear experts", (), blocks))
    return Page(
        simulated=", ".join(results.simulated),
        opening=opening(results),
        sections=sections,
        facts=[
            Grid((), card_facts(phase), title=title_of(phase)) for phase in results.phases.values()
        ],
        settings=results.settings,
    )


def opening(results: Results) -> str:
    """What was compared, and what was measured of it."""
    methods = results.methods
    phases = list(results.phases.values())
    seeds = len(phases[0].models[methods[0]])
    data = " → ".join(phase.card["name"] for phase in phases)
    measured = what_was_measured(phases[0])
    alike = measured[-1]
    if measured[1:]:
        alike = f"{', '.join(measured[:-1])} and {alike}"
    compared = f"{counted(len(methods), 'method')}, {counted(seeds, 'seed')} each, on {data}."
    return f"{compared} Every model is measured alike: {alike}."


def what_was_measured(phase: Phase) -> list[str]:
    """The score, and what any model of the phase has."""
    score = "accuracy" if phase.task.score.form == "share" else "error"
    found = [
        shown.title
        for shown in SHOWN
        if shown.stage and any(model.of(shown.result) for model in phase.every)
    ]
    if phase.together:
        found.append("transfer of attacks")
    return [score, *found]


def section_of(results: Results, phase: Phase) -> Section:
    """The numbers of a phase, then what each measurement has to say."""
    title = title_of(phase)
    blocks = numbers(results, phase)
    for shown in SHOWN:
        if has(shown, phase):
            blocks += shown.blocks(phase)
    blocks += transfer.part(phase)
    reasons = not_measured(phase)
    blocks.append(Block("What does not apply to a method", below=reasons, folded=True))
    return Section(phase.name, title, title, (), without_empty(blocks))


def has(shown: Shown, phase: Phase) -> bool:
    """Whether any model of the phase has such a result."""
    return shown.applies(phase.task) and bool(phase.results(shown.result))


def not_measured(phase: Phase) -> list[str]:
    """Measurements that were left out, and why; a reason once for each method."""
    found = [
        f"{method}, {reason}."
        for method, seeds in phase.models.items()
        for model in seeds.values()
        for reason in model.skipped
    ]
    return list(dict.fromkeys(found))


def numbers(results: Results, phase: Phase) -> list[Block]:
    """The headline, the tables of the papers, and the table of everything."""
    found = table(results, phase)
    columns = [metric.column for metric in found.metrics]
    controls = [method for method in found.cells if method in results.controls]
    grid = by_method(headline(phase, columns), found.cells, controls=controls)
    every = by_metric(columns, found.cells)
    return [
        Block("", grids=[grid], below=[legend(results, phase, found, controls)], marks=True),
        by_paper(columns, found.cells),
        Block("All measurements", grids=[every], folded=True),
    ]


def legend(results: Results, phase: Phase, found: Table, controls: Sequence[str]) -> str:
    """How intervals and marks are to be read."""
    every = [cell for row in found.cells.values() for cell in row.values() if cell]
    kinds = {cell.kind for cell in every}
    how = ", ".join(text for kind, text in KINDS.items() if kind in kinds)
    words = [f"Small figures: 95 % intervals ({how})."]
    if "quartiles" in kinds:
        words.append("Of timings: quartiles.")
    known = used_tests(results, phase, found.metrics)
    tests = "; ".join(text for test, text in WORDS.items() if test in known)
    chance = f" beyond chance at 5 %: {tests}" if tests else ""
    words.append(f"Marked: better than every other method{chance}.")
    words.append("No mark means no difference was shown.")
    if controls:
        words.append(f"Marks leave out {', '.join(controls)} (control): {CONTROL}.")
    return " ".join(words)


def title_of(phase: Phase) -> str:
    """A phase and its data."""
    return f"{TITLES.get(phase.name, phase.name)} on {phase.card['name']}"


def counted(count: int, word: str) -> str:
    """1 seed, 2 seeds."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


@cache
def environment() -> Environment:
    """The templates, which escape all text."""
    found = Environment(
        loader=PackageLoader("moecore.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["drawn"] = drawn
    return found


def drawn(picture: Picture) -> Markup | str:
    """Markup of an SVG, or the address of a PNG."""
    if picture.raster:
        return pictures.png(picture.figure)
    return Markup(pictures.svg(picture.figure, picture.label))
