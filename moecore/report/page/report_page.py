"""The report's page: one self-contained HTML file."""

import base64
import io
import re
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from typing import Any

import matplotlib
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from moecore.report import column, results_and_displays
from moecore.report.claims.claims_table import claims_section
from moecore.report.claims.evaluation import EvaluatedClaim
from moecore.report.figures import drawing, overview
from moecore.report.headline_quantities import PhaseQuantities, choose_main_quantities
from moecore.report.page import page_objects, sections
from moecore.report.page.page_objects import PageCell, TableRow
from moecore.report.pictures import experts, robustness
from moecore.report.result_types import PhaseResults, StudyResults
from moecore.report.tables import cells, metrics_by_method, terminal_summary
from moecore.study.run_and_claims import Claim

MAX_CLASS_NAMES = 20  # classes, at most, whose names are listed


def render_report(
    results: StudyResults, evaluated: Sequence[EvaluatedClaim] = (), explorer: str | None = None
) -> str:
    # explorer: address of the routing explorer, relative to the page's folder, if there is one.
    page = build_page(results, evaluated)._replace(explorer=explorer or "")
    return template_environment().get_template("page.html.jinja").render(page=page)


def build_page(results: StudyResults, evaluated: Sequence[EvaluatedClaim]) -> page_objects.Page:
    parts = [claims_section(evaluated)] if evaluated else []
    papers = {answer.claim.paper for answer in evaluated if isinstance(answer.claim, Claim)}
    overviews, facts, quantities = [], [], {}
    for name, phase in results.phases.items():
        table = metrics_by_method.build_table(results, phase)
        quantities[name] = choose_main_quantities(phase, table, results.controls)
        notes = []
        if not phase.task.long and quantities[name].attacked is None:  # texts are not attacked
            notes.append("Not measured: the score under attack (the stage robustness would).")
        is_routed = column.find_moe_baseline(phase.models) != ""
        if not phase.task.long and is_routed and quantities[name].steady is None:
            notes.append("Not measured: how steady the routing is (the stage robustness would).")
        controls = results.controls - {column.CEILING}
        if left_out := [method for method in phase.models if method in controls]:
            notes.append(f"Not shown: {cells.join_names(left_out)} (control).")
        charts = list(overview.draw_overview(phase, quantities[name]))
        title = sections.phase_title(phase)
        block = page_objects.PageBlock(title, pictures=charts, below=notes, id=f"overview-{name}")
        overviews.append(block)
        parts.append(sections.phase_section(results, phase, table, papers))
        facts.append(page_objects.PageTable((), list_data_fact_rows(phase), title=title))
    calculated = [
        sections.calculation_section(display, phase, metrics_by_method.build_table(results, phase))
        for display, phase in results_and_displays.list_calculations(results)
    ]
    cards = [phase.card for phase in results.phases.values()]
    return page_objects.Page(
        simulated=", ".join(card["name"] for card in cards if card.get("simulated")),
        title=cells.keep_percent_on_line(terminal_summary.main_result_sentence(results)),
        answer=main_finding(results, quantities, evaluated, calculated),
        overviews=overviews,
        sections=[*parts, *calculated],
        facts=facts,
        settings=results.settings,
    )


def main_finding(
    results: StudyResults,
    quantities: Mapping[str, PhaseQuantities],
    evaluated: Sequence[EvaluatedClaim],
    calculated: Sequence[page_objects.PageSection],
) -> str:
    """Return the page's main sentences: value of routing, verdicts on claims, attacks."""
    phase = next(iter(results.phases.values()), None)
    if phase is None:
        if evaluated:
            return sections.describe_verdict_counts(evaluated)
        stated = (block.finding for section in calculated for block in section.blocks)
        return cells.keep_percent_on_line(next(filter(None, stated), "Nothing was trained."))
    sentences = [experts.describe_routing_gain(phase, column.find_moe_baseline(phase.models))]
    if evaluated:
        sentences.append(sections.describe_verdict_counts(evaluated))
    else:
        measured = quantities[phase.name]
        title = sections.phase_title(phase)
        sentences.append(sections.describe_phase_findings(phase, title, measured, results.controls))
    sentences.append(robustness.describe_attacks(phase, results.attacks))
    return cells.keep_percent_on_line(" ".join(filter(None, sentences)))


def list_data_fact_rows(phase: PhaseResults) -> list[TableRow]:
    card = phase.card
    if phase.task.kind == "regression":
        facts = list_cohort_facts(card)
    else:
        classes = phase.task.answers
        facts = {
            "Images": ", ".join(f"{split} {count:,}" for split, count in card["images"].items()),
            "Classes": ", ".join(classes) if len(classes) <= MAX_CLASS_NAMES else str(len(classes)),
            "Shape": f"{card['channels']} × {card['size']} × {card['size']}",
        }
    facts |= {"Licence": card["licence"], "Source": card["source"]}
    if "seed" in card:  # text is split without random numbers
        facts |= {"Split seed": str(card["seed"])}
    return [TableRow(PageCell(key), [PageCell(text, look="words")]) for key, text in facts.items()]


def list_cohort_facts(card: Mapping[str, Any]) -> dict[str, str]:
    low, high = card["target_range"]
    unit = card["task"]["unit"]
    edges = " × ".join(f"{edge:g}" for edge in card["voxel_mm"])
    volumes = []  # train 60 (F 30, M 30)
    for split, by_sex in card["counts"].items():
        sexes = ", ".join(f"{name} {number}" for name, number in by_sex.items())
        volumes.append(f"{split} {card['images'][split]:,} ({sexes})")
    return {
        "Data": "SIMULATED" if card["simulated"] else "scans of people",
        "Volumes": "; ".join(volumes),
        "Ages in training": f"{low:.1f} to {high:.1f} {unit}",
        "Shape": f"{' × '.join(map(str, card['size']))} voxels of {edges} mm",
        "Tissue maps": ", ".join(card["regions"]) or "none",
        "Excluded volumes": str(len(card["skipped"])),
    }


@cache
def template_environment(is_html: bool = True) -> Environment:
    """Return the Jinja environment of the templates; in HTML it escapes all text."""
    loader = PackageLoader("moecore.report")
    environment = Environment(loader=loader, autoescape=is_html, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.filters["drawn"] = render_picture
    return environment


def render_picture(picture: page_objects.Picture) -> Markup | str:
    if picture.raster:
        return render_png_data_uri(picture.figure)
    return Markup(render_svg(picture.figure, picture.label))


def render_svg(figure: Figure, label: str) -> str:
    """Return the figure as an <svg> element; label: for screen readers, unique in the page."""
    buffer = io.StringIO()
    # The label, for screen readers, also salts the ids: it is unique within a page.
    with matplotlib.rc_context({**drawing.STYLE, "svg.hashsalt": label}):
        FigureCanvasSVG(drawing.freeze_layout(figure)).print_svg(buffer, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    for size in ("width", "height"):
        text = re.sub(rf'(<svg[^>]*?) {size}="[^"]*"', r"\1", text, count=1)
    start = f'<svg role="img" aria-label="{escape(label, quote=True)}"'
    return text.replace("<svg", start, 1).replace(drawing.INK, "currentColor")


def render_png_data_uri(figure: Figure) -> str:
    buffer = io.BytesIO()
    with matplotlib.rc_context(drawing.STYLE):
        drawing.freeze_layout(figure).set_dpi(110)
        FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
