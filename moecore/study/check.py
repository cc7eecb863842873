"""Checks a study before anything runs: its params.yaml, its data and its models.

``check_study`` checks everything, ``read_study_and_problems`` the file alone. Settings check
themselves (``Config.misfits``); rules (``*_misfits``, in the modules ``*_rules``) compare sections.
Both yield (keys, message): the keys to a setting in params.yaml, and what is wrong; file, line and
column are added here. ``run``, ``claims`` and ``questions`` are compared with the plain data of the
file, so also if a section is invalid.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from moecore.core.config import KIND, Part, Surroundings, find_class, part_classes_by_kind
from moecore.core.files import UserError
from moecore.core.source_layout import DOTTED_NAME
from moecore.data.card import Card
from moecore.measure.base import Calculation, Measurement
from moecore.study import model_rules, part_rules, trial_rules
from moecore.study.params_layers import count_existing_keys, list_dvc_stages
from moecore.study.params_reader import describe_allowed_values, error_line_position
from moecore.study.stages import (
    CALCULATE,
    MEASURE,
    MEASURED_STAGES,
    PHASES,
    STAGE_SECTIONS,
    STAGES,
    describe_how_to_add,
)
from moecore.study.study import (
    MEASURED_SECTIONS,
    OPTIONAL_SECTIONS,
    Misfits,
    Study,
    build_study_class,
    read_study,
    stage_by_section,
)
from moecore.study.yaml_document import (
    YamlDocument,
    cap_line_count,
    dict_or_empty,
    did_you_mean,
    list_or_empty,
    load_yaml_document,
)

# A rule of a higher room: (study, stages, phase → card of its data) → (keys, message) pairs.
ExtraCheck = Callable[[Study, Sequence[str], Mapping[str, Card]], Iterable[tuple[tuple, str]]]
MAX_NUMBER_BY_TYPE = {int: 10**15, float: 1e100}  # no setting is larger
METHOD_NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,99}")


class MissingDataError(UserError):
    """Error for a study whose only problem is that its data are missing or unreadable."""


class CheckedStudy(NamedTuple):
    study: Study
    notes: tuple[str, ...]  # a line per data set, and remarks that are not errors
    untried: tuple[str, ...]  # a line per outside part that could not be tried on small data


def check_study(
    path: str | Path = "params.yaml", home: Path | None = None, also: ExtraCheck | None = None
) -> CheckedStudy:
    """Check a params.yaml, its data and its models; return the study and remarks."""
    # home: folder in which stages run; by default the file's. also: a last, additional check.
    folder = Path(path).parent
    document, stages = load_yaml_document(path), list_dvc_stages(folder)
    return check_study_document(document, stages, folder if home is None else home, also)


def check_study_document(
    document: YamlDocument, stages: Sequence[str], home: Path, also: ExtraCheck | None = None
) -> CheckedStudy:
    """Check a parsed params.yaml as ``check_study`` does; home: folder in which stages run."""
    study, problems = read_study_and_problems(document, stages)
    if study is None:
        raise UserError(cap_line_count(problems))
    untried: list[str] = []
    with model_rules.chdir_to_study(home):
        if faults := list(trial_rules.outside_source_misfits(study, untried)):
            raise UserError(cap_line_count([*problems, *format_misfits(document, faults)]))
        previews = model_rules.load_data_previews(study)
    missing = format_misfits(document, model_rules.unusable_data(previews, document.data))
    misfits = [
        *model_rules.misfits_with_pretrain_images(study, previews),
        *part_rules.part_misfits(study, previews),
    ]
    misfits = [misfit for misfit in misfits if str(document.error(*misfit)) not in problems]
    if not problems:  # else models would be wrong for the same reasons
        misfits += model_rules.model_misfits(study, previews)
        if not misfits:
            misfits += trial_rules.outside_part_misfits(study, previews, untried)
            misfits += trial_rules.trial_step_misfits(study, [keys for keys, _ in misfits])
        if also is not None and not misfits:  # it assumes that all rules above hold
            misfits += also(study, stages, previews)
    lines = [*problems, *missing, *format_misfits(document, misfits)]
    if missing and len(lines) == len(missing):
        raise MissingDataError(cap_line_count([*lines, f"{document.path}: all else is in order"]))
    if lines:
        raise UserError(cap_line_count(lines))
    notes = []
    for phase, preview in previews.items():
        key = ".".join(model_rules.data_source_key_path(phase))
        notes.append(f"{key}: {model_rules.describe_planned_data(preview)}")
    notes += part_rules.list_remarks(study, previews)
    return CheckedStudy(study, tuple(notes), tuple(untried))


def check_and_describe(path: str | Path = "params.yaml", also: ExtraCheck | None = None) -> str:
    """Check a study and return lines to print: "in order", a line per data set, remarks."""
    study, notes, untried = check_study(path, also=also)
    trained = "nothing is trained"
    if study.run.methods:
        seeds = ", ".join(map(str, study.run.seeds))
        trained = f"{', '.join(study.run.methods)}; seeds {seeds}"
    return "\n  ".join([f"{path}: in order ({trained})", *notes, *untried])


def check_without_data(document: YamlDocument, stages: Sequence[str]) -> Study:
    """Return the study of a params.yaml, checked without its data; UserError if invalid."""
    study, problems = read_study_and_problems(document, stages)
    if study is None or problems:
        raise UserError(cap_line_count(problems))
    return study


def read_study_and_problems(
    document: YamlDocument, stages: Sequence[str]
) -> tuple[Study | None, list[str]]:
    """Return the study (None if invalid), and one line per problem."""
    study = None
    problems = []
    try:
        study = read_study(document)
    except UserError as error:
        problems = str(error).split("\n")
    if stages and isinstance(document.data, dict):
        problems += format_misfits(document, _missing_or_unread_sections(document.data, stages))
    if stages and study is not None:
        problems += format_misfits(document, _missing_out_of_fold(study, stages))
    problems += format_misfits(document, cross_section_misfits(document.data, study))
    endless = format_misfits(document, _non_finite_or_huge_numbers(document.data))
    places = {error_line_position(line) for line in endless}
    problems = endless + [line for line in problems if error_line_position(line) not in places]
    return study, sorted(dict.fromkeys(problems), key=error_line_position)


def format_misfits(document: YamlDocument, misfits: Iterable[tuple[tuple, str]]) -> list[str]:
    return [str(document.error(*misfit)) for misfit in misfits]


def params_schema() -> dict[str, Any]:
    classes = part_classes_by_kind(Measurement, imports=True)
    outside = {name: part for name, part in classes.items() if DOTTED_NAME.fullmatch(name)}
    draft = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": draft} | build_study_class(outside).model_json_schema()


def cross_section_misfits(data: Any, study: Study | None) -> Misfits:
    """Yield (keys, message) for sections or parts that contradict each other."""
    yield from run_section_misfits(data)
    if study is not None:
        of_sections = part_rules.list_section_conflicts(study)
        yield from part_rules.first_misfit_per_key(of_sections, part_rules.part_misfits(study, {}))
        yield from _parts_without_written_kind(study, data)


def _missing_or_unread_sections(data: dict[str, Any], stages: Sequence[str]) -> Misfits:
    """Yield (keys, message) for missing sections that a stage needs, and for unread ones."""
    run = dict_or_empty(data.get("run"))
    readers = stage_by_section(stages, run)
    for key, stage in readers.items():
        if key in OPTIONAL_SECTIONS or data.get(key) is not None or key not in Study.model_fields:
            continue
        if key in ("run", "data") and key not in data:
            continue  # pydantic reports it
        lack = "found null" if key in data else f"missing; the stage {stage} reads it"
        yield (key,), f"{lack}; allowed: {describe_allowed_values(Study, (key,))}"
    measured = set(Study.model_fields) - {key for keys in STAGE_SECTIONS.values() for key in keys}
    # A measurement that is switched off may keep its section
    welcome = {*readers, *(measured if MEASURE in stages else ())}
    welcome |= {*OPTIONAL_SECTIONS}.difference(STAGES)
    for key in data:
        if key in Study.model_fields and key not in welcome:
            reading = [stage for stage, sections in STAGE_SECTIONS.items() if key in sections]
            stage = key if key in reading else [*reading, MEASURE][0]
            text = f"found a section that no stage reads; allowed: {', '.join(readers)}"
            yield (key,), f"{text}; or with {describe_how_to_add(stage)}"
    # DVC reads the matrix of measurements from the file, so defaults do not apply
    read_lists = {"measurements": MEASURE, "thorough": MEASURE, "calculations": CALCULATE}
    for key, stage in read_lists.items():
        if stage in stages and key not in run:
            text = f"missing; the stage {stage} of dvc.yaml goes by it; allowed: a list"
            yield ("run", key), text
        if stage not in stages and key != "thorough" and run.get(key):
            text = f"found a list, but dvc.yaml has no stage {stage}"
            yield ("run", key), f"{text}; allowed: with {describe_how_to_add(stage)}"
    sources = data.get("data")
    if not isinstance(sources, dict):
        return
    for phase in PHASES:
        if phase not in stages and phase in list_or_empty(run.get("phases")):
            text = f"found {phase}, but dvc.yaml has no stage {phase}"
            yield ("run", "phases"), f"{text}; allowed: with {describe_how_to_add(phase)}"
        if phase in stages and phase not in sources:
            text = f"missing; the stage {phase} works on it; allowed: a source, as data.pretrain"
            yield ("data", phase), text


def _missing_out_of_fold(study: Study, stages: Sequence[str]) -> Misfits:
    """Yield (keys, message) if the calibrator needs the stage out_of_fold, which is missing."""
    split = study.calibrate.calibrator.split if study.calibrate is not None else ""
    if split != "out_of_fold":
        return
    if split not in stages:
        text = f"found {split}, but the stage of this name is not in dvc.yaml"
        allowed = f"train, validation, or with {describe_how_to_add(split)}"
        yield ("calibrate", "calibrator", "fit_on"), f"{text}; allowed: {allowed}"
    for index, phase in enumerate(study.run.phases):
        if phase != "pretrain":
            text = f"found {phase}, but the stage {split} predicts for pretrain alone"
            yield ("run", "phases", index), f"{text}; allowed with fit_on: {split}: pretrain"


def _non_finite_or_huge_numbers(value: Any, keys: tuple = ()) -> Misfits:
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _non_finite_or_huge_numbers(inner, (*keys, key))
    elif isinstance(value, float) and not math.isfinite(value):
        yield keys, f"found {'.nan' if math.isnan(value) else value}; allowed: a finite number"
    elif type(value) in MAX_NUMBER_BY_TYPE and abs(value) > MAX_NUMBER_BY_TYPE[type(value)]:
        # An integer may be too large for a float
        shown = f"{value:.3g}" if abs(value) < 10**308 else "a number beyond 1e+308"
        yield keys, f"found {shown}; allowed: numbers up to {MAX_NUMBER_BY_TYPE[type(value)]:.0e}"


def _parts_without_written_kind(study: Study, data: Any) -> Misfits:
    for keys, settings, _ in part_rules.walk_settings((), study, Surroundings()):
        if isinstance(settings, Part) and count_existing_keys(data, (*keys, KIND)) <= len(keys):
            text = f"found none; allowed: `kind: {settings.kind}`, as a default is not tracked"
            yield keys, f"{text}, so DVC would miss changes of that part"


def run_section_misfits(data: Any) -> Misfits:
    """Yield (keys, message) for unknown or repeated names in run, claims and questions."""
    # Wrong: unknown, listed twice, or a name that no folder can have. data: the file's content.
    sections = dict_or_empty(data)
    run = dict_or_empty(sections.get("run"))
    methods = list(dict_or_empty(sections.get("methods")))
    known_names = {"methods": methods, "measurements": MEASURED_SECTIONS, "calculations": []}
    for key, names in known_names.items():
        listed = list(map(str, names))
        if key != "methods":
            listed.append("package.module of a listed package")
        allowed = ", ".join(listed) or f"nothing, {key} is empty"
        for index, name in enumerate(list_or_empty(run.get(key))):
            if key != "methods" and isinstance(name, str) and DOTTED_NAME.fullmatch(name):
                for text in _outside_measurement_problems(sections, name, key):
                    yield ("run", key, index), text
            elif isinstance(name, str) and name not in names:
                hint = did_you_mean(name, names)
                if key == "measurements" and name in MEASURED_STAGES:
                    hint = f", which is no measurement but {describe_how_to_add(name)}"
                yield ("run", key, index), f"found {name!r}{hint}; allowed: {allowed}"
    for key in ("methods", "seeds", "phases", "measurements", "calculations"):
        before: set[str] = set()
        for index, value in enumerate(list_or_empty(run.get(key))):
            if repr(value) in before:
                yield ("run", key, index), f"found {value!r} a second time; allowed: each once"
            if key == "seeds" and isinstance(value, int) and value < 0:
                yield ("run", key, index), f"found {value}; allowed: integers ≥ 0"
            before.add(repr(value))
    yield from _claim_misfits(sections, run)
    yield from _repeated_claims(sections)
    for name in methods:
        if not METHOD_NAME_PATTERN.fullmatch(name):
            allowed = "up to 100 small letters, digits and _, a letter first (it becomes a folder)"
            yield ("methods", name), f"found the name {name!r}; allowed: {allowed}"
    yield from _phases_without_data(sections, run)


def _outside_measurement_problems(sections: dict, name: str, key: str) -> Iterator[str]:
    """Yield why ``name`` cannot be in ``run.<key>``; key: measurements or calculations."""
    package, _, module = name.partition(".")
    if "." in module:
        yield f"found {name!r}; allowed: package.module"
    elif module not in (settings := dict_or_empty(sections.get(package))):
        hint = did_you_mean(module, list(settings))
        lines = f"{package}: {{{module}: {{}}}} (all as by default)"
        yield f"{name} has no settings{hint}; write {lines}"
    else:
        try:
            needs_model = not issubclass(find_class(Measurement, name), Calculation)
        except ValueError as error:
            yield str(error)
            return
        if needs_model != (key == "measurements"):
            other = "measurements" if needs_model else "calculations"
            yield f"found {name}; allowed: in run.{other}, by its base class"


def _claim_misfits(sections: dict, run: dict) -> Misfits:
    # Claims may name methods and phases that ``run`` leaves out.
    methods = [*dict_or_empty(sections.get("methods")), *list_or_empty(run.get("calculations"))]
    phases = [phase for phase in PHASES if phase in sections]
    known_by_key = {"method": methods, "against": methods, "phase": phases}
    for section in ("claims", "questions"):
        for index, claim in enumerate(map(dict_or_empty, list_or_empty(sections.get(section)))):
            for key, allowed in known_by_key.items():
                value = claim.get(key)
                if isinstance(value, str) and value not in allowed:
                    listed = ", ".join(map(str, allowed))
                    text = f"found {value!r}{did_you_mean(value, allowed)}; allowed: {listed}"
                    yield (section, index, key), text
            method, against = claim.get("method"), claim.get("against")
            if method is not None and method == against and not claim.get("against_metric"):
                run_methods = ", ".join(map(str, list_or_empty(run.get("methods"))))
                allowed = f"another of {run_methods}, or the same with against_metric"
                text = f"found {against!r}, the method itself; allowed: {allowed}"
                yield (section, index, "against"), text
            elif method != against and "." in f"{method}{against}":
                text = f"found {against!r} against {method}; allowed: a calculation against itself"
                yield (section, index, "against"), text


def _repeated_claims(sections: dict) -> Misfits:
    first: dict[str, int] = {}
    for index, claim in enumerate(map(dict_or_empty, list_or_empty(sections.get("claims")))):
        metric = claim.get("metric")
        phase = claim.get("phase", "pretrain")
        ours = [metric, claim.get("method")]
        theirs = [claim.get("against_metric") or metric, claim.get("against")]
        is_direction = claim.get("margin") is None  # "slightly higher" is a direction and a size
        fact = repr((claim.get("paper"), phase, sorted([ours, theirs], key=repr), is_direction))
        if (same := first.setdefault(fact, index)) != index:
            text = f"found the two numbers of claims[{same}]; allowed: each fact once"
            yield ("claims", index, "metric"), text


def _phases_without_data(sections: dict, run: dict) -> Misfits:
    """Yield (keys, message) for phases in ``run.phases`` without a section or without data."""
    if run.get("methods") == [] and "pretrain" in sections:
        yield ("run", "methods"), "found none, but there is pretrain; allowed: entries of methods"
    data = dict_or_empty(sections.get("data"))
    for index, phase in enumerate(list_or_empty(run.get("phases"))):
        if phase not in PHASES:
            continue
        needed = {phase: phase in sections, f"data.{phase}": phase in data}
        if lacking := " and ".join(name for name in sorted(needed) if not needed[name]):
            text = f"found {phase} without {lacking}; allowed: with these, or no phase"
            yield ("run", "phases", index), text
