"""``moecore conform``: which laws of mixtures a layer of ours, or of another library, keeps."""

import inspect
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from moecore.conformance import own_layers, reproductions
from moecore.conformance.laws import LAWS, Law, check_law
from moecore.conformance.targets import NotPromised, Target
from moecore.core.config import builtin_kinds, find_class
from moecore.core.files import UserError, read_json, write_atomic, write_json
from moecore.core.source_layout import (
    SHIPPED,
    allowing_packages,
    format_error_with_line,
    import_module_of_package,
)
from moecore.lens.recording import run_python_file
from moecore.nn.routers.base import Router
from moecore.report.page.report_page import template_environment
from moecore.study import study, yaml_document

STATUS_MARKS = {"holds": "holds", "fails": "FAILS", "not promised": "–", "not run": "not run"}


def find_targets(text: str) -> list[Target]:
    """Return the layers that ``text`` names: a router, a method, MODULE:NAME or FILE.py[:NAME]."""
    if text.endswith(".py"):
        return read_namespace_targets(text, run_python_file(Path(text)), "TARGETS")
    if ".py:" in text:
        stem, _, name = text.partition(".py:")
        return read_namespace_targets(text, run_python_file(Path(f"{stem}.py")), name)
    if ":" in text:
        module, _, name = text.partition(":")
        with allowing_packages([module.partition(".")[0]]):
            try:
                return read_namespace_targets(text, vars(import_module_of_package(module)), name)
            except ValueError as error:
                raise UserError(f"{text}: {error}") from None
    if text in builtin_kinds(Router):
        router: Any = find_class(Router, text)
        return [own_layers.describe_own_layer(router())]
    params = Path("params.yaml") if Path("params.yaml").is_file() else SHIPPED / "params.yaml"
    methods = study.read_study(yaml_document.load_yaml_document(params)).methods
    method = methods.get(text)
    if method is None or method.router is None:
        sparse = [name for name in methods if methods[name].router is not None]
        allowed = f"{', '.join([*builtin_kinds(Router), *sparse])}, PACKAGE.MODULE:NAME, FILE.py"
        raise UserError.at("TARGET", found=text, allowed=allowed)
    return [own_layers.describe_own_layer(method.router, method.experts, text)]


def read_namespace_targets(text: str, names: dict[str, Any], name: str) -> list[Target]:
    """Return the targets called ``name``: a Target, several, or a function that returns them."""
    chosen = names.get(name)
    if inspect.isfunction(chosen):
        chosen = chosen()
    if isinstance(chosen, Target):
        return [chosen]
    if isinstance(chosen, Iterable):
        targets = list(chosen)
        if all(isinstance(target, Target) for target in targets):
            return targets
    kind = f"{name}, {type(chosen).__name__}"
    raise UserError.at(text, found=kind, allowed="a Target, a list, a function that returns it")


def judge_and_write_failures(target: Target, folder: Path) -> dict[str, Any]:
    """Check every law of a target; write a reproduction of each failure into ``folder``."""
    verdicts = []
    for law in LAWS.values():
        start = time.perf_counter()
        try:
            status, note = "holds", check_law(law, target) or ""
        except NotPromised as reason:
            status, note = "not promised", str(reason)
        except AssertionError as error:
            status, note = "fails", str(error)
        except UserError as error:
            status, note = "not run", str(error)
        except Exception as error:  # in the library or its adapter: the other laws still run
            status, note = "not run", format_error_with_line(error)
        seconds = round(time.perf_counter() - start, 3)
        verdict = {"law": law.name, "status": status, "note": note, "seconds": seconds}
        verdict["reproduction"] = ""
        script = folder / target.scripts.get(law.name, "")
        if status == "fails" and script.is_file():
            verdict["reproduction"] = script.name
        elif status == "fails":
            file, text = render_reproduction(target, law, note)
            if text:
                write_atomic(folder / file, text)
                verdict["reproduction"] = file
            elif file:
                verdict["note"] += " (no script of at most 20 lines: the adapter is too long)"
        verdicts.append(verdict)
    name = f"{target.name} {target.version}".strip()
    return {"target": name, "runs": target.runs, "verdicts": verdicts}


def render_reproduction(target: Target, law: Law, note: str) -> tuple[str, str]:
    """Return (name, text) of a script that shows a failure; ("", "") if it would import moecore."""
    setup = reproductions.read_setup(target)
    if "moecore" in setup:
        return "", ""
    build = target.build
    call = "build()"
    if isinstance(build, partial):
        call = f"build(*{build.args}, **{build.keywords})"
    template = template_environment(is_html=False).get_template("reproduction.py.jinja")
    text = template.render(target=target, law=law, setup=setup.strip(), note=note, build=call)
    file = f"{target.name}-{target.version}-{law.name}.py".replace(" ", "-")
    return file, reproductions.shorten_script(text)


def print_conformance(results: list[dict[str, Any]]) -> None:
    """Print the table law × target, then a line per failure and per law that did not run."""
    from rich.console import Console
    from rich.table import Table

    table = Table("law", *(result["target"] for result in results), box=None, padding=(0, 1))
    for row in zip(*(result["verdicts"] for result in results), strict=True):
        table.add_row(row[0]["law"], *(STATUS_MARKS[verdict["status"]] for verdict in row))
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    for result in results:
        laws: dict[str, list[str]] = {}  # "status: note" → laws
        for entry in result["verdicts"]:
            if entry["status"] in ("fails", "not run"):
                laws.setdefault(f"{entry['status']}: {entry['note']}", []).append(entry["law"])
        for note, names in laws.items():
            which = ", ".join(names)
            if len(names) == len(LAWS):
                which = "all laws"
            line = f"{result['target']}: {which} {note}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def check_target_and_store_verdicts(text: str, json_file: Path | None, out: Path) -> bool:
    """Check a target, print and store the verdicts; return whether no law fails."""
    results = [judge_and_write_failures(target, out / "findings") for target in find_targets(text)]
    print_conformance(results)
    if json_file is not None:
        write_json(json_file, results)
    stored = out / "results.json"  # name and version → the last verdicts
    by_target = {}
    if stored.is_file():
        by_target = read_json(stored)
    by_target |= {result["target"]: result for result in results}
    write_json(stored, by_target)
    in_order = [by_target[name] for name in sorted(by_target)]
    options = {"results": in_order, "laws": LAWS.values(), "marks": STATUS_MARKS}
    page = template_environment(is_html=False).get_template("conformance.md.jinja")
    write_atomic(out / "README.md", page.render(reasons=targets_by_reason(in_order), **options))
    return not any(each["status"] == "fails" for result in results for each in result["verdicts"])


def targets_by_reason(results: list[dict[str, Any]]) -> dict[tuple[str, str], list[str]]:
    """Return (law, reason why it is not promised) → names of the targets with this verdict."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for verdict in result["verdicts"]:
            if verdict["status"] == "not promised":
                reasons.setdefault((verdict["law"], verdict["note"]), []).append(result["target"])
    return dict(sorted(reasons.items()))
