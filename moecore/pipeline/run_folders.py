"""Run folders below .runs/ for questions, folders of pictures and sweeps, and stored results.

A run folder is a separate DVC project with the project's cache, ignored by the project's git. DVC
refuses files that git ignores, so it is a git repository, too: its last commit is what was written,
and ``dvc params diff`` shows how its params.yaml differs from that.
"""

import json
import keyword
import math
import re
import shutil
from collections.abc import Iterator, Sequence
from itertools import chain, product
from pathlib import Path
from statistics import median
from string import Template
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from moecore.core import files
from moecore.core.files import UserError, find_raw_folder, read_json, write_atomic
from moecore.core.source_layout import ROOT, RUNS, SHIPPED, run_git
from moecore.data.files import decode, image_files_source
from moecore.data.sources.image_folder import ImageFolder
from moecore.pipeline import dvc_yaml, project_record
from moecore.report.claims.evaluation import SECTIONS
from moecore.report.claims.items_and_dates import (
    ASKED_KEY,
    COMPARE_JSON_FILE,
    ITEMS_FILE,
    copy_items_to_results,
    find_head_if_committed,
)
from moecore.report.tables.metrics_by_method import unanswerable_claims
from moecore.run.history_file import read_dvc_locks
from moecore.study import check, papers, params_layers, params_writer, trial_rules
from moecore.study.questions import PIPELINES, QuestionFile, QuestionRound
from moecore.study.study import read_study
from moecore.study.yaml_document import dict_or_empty, load_yaml_document, parse_yaml_document

CURRENT_FOLDER = Path()
OWN_QUESTIONS_FOLDER = "ours"
STUDY_NAME_PATTERN = re.compile(r"[a-z][a-z0-9_]*")
SHIPPED_PARAMS_LABEL = "moecore's params.yaml"
ASKED_FILE = "asked.json"  # of a run folder: the commit that asked, when the folder was written
IGNORED = "artifacts/\nreports/\n.state/\ndvc_plots/\n.dvc/tmp/\n"
COMMITTED = ("params.yaml", "dvc.yaml", "steps", ".dvc/config")
COMMIT = ("-c", "user.name=moecore", "-c", "user.email=moecore@localhost", "commit", "--quiet")
COMMIT += ("--no-verify", "--no-gpg-sign", "-m", "written by moecore")
USUAL_METHODS = ("dense", "vmoe")  # of a new question, where params.yaml has them
NEW_STAGES = ("prepare", "teacher", "teacher_router", "pretrain", "measure", "calculate", "compare")
LISTS = {"measure": "measurements", "calculate": "calculations"}  # of ``run``, by their stage
NEW_QUESTION = """\
# Everything else is as in the world that `world:` names, or as in params.yaml.
question: what is asked, in one line?
answer: ""
seeds: 0-2
run: {{phases: [pretrain], thorough: [pretrain]}}
methods: [{methods}]  # or a mapping: {{{last}_16: {{from: {last}, experts: {{number: 16}}}}}}
claims: []
questions: []
teacher: {{kind: no_teacher}}  # leave this out where a method needs one: each seed has its own
stages: [{stages}]
"""


def write_run_folder(question_round: QuestionRound, presets: Sequence[str] = ()) -> list[str]:
    root = question_round.question.root
    folder = question_round.folder
    composed = question_round.compose(presets)
    edited = str(PIPELINES / f"{question_round.question.name}.yaml")
    schema = "../../params.schema.json"
    origin = params_writer.ParamsOrigin(edited, "params.yaml", schema, root / PIPELINES)
    text = params_writer.params_text(composed, origin, presets)
    is_new = not (folder / "params.yaml").is_file()
    with project_record.hold_project_lock(folder / project_record.LOCK):
        changes = params_writer.write_and_diff_params(folder / "params.yaml", text)
        lines = ["written"] if is_new else [*changes]
        write_dvc_yaml_files(folder, composed.stages)
        has_git = shutil.which("git")
        config = dvc_yaml.RUN_CONFIG + ("" if has_git else dvc_yaml.WITHOUT_GIT)
        files.write_atomic(folder / ".dvc/config", config)
        if has_git:
            if not (folder / ".git").is_dir():
                run_git(folder, "init", "--quiet", "--template=")
                files.write_atomic(folder / ".git/info/exclude", IGNORED)
            names = [name for name in COMMITTED if (folder / name).exists()]
            run_git(folder, "add", "--all", "--", *names)
            run_git(folder, *COMMIT)
        has_record = not changes and (folder / ASKED_FILE).is_file()
        if not has_record or not (folder / COMPARE_JSON_FILE).is_file():
            asking = [path.relative_to(root) for path in question_round.question.asking_files]
            commit, file = find_head_if_committed(root, *asking), asking[0].as_posix()
            files.write_json(folder / ASKED_FILE, {"commit": commit, "file": file})
            if commit is None and run_git(root, "rev-parse", "HEAD"):
                lines.append(f"{file}: not committed; the result cannot say when it was asked")
    return lines


def write_project_from_overlay(folder: Path = CURRENT_FOLDER) -> list[str]:
    """Write params.yaml and dvc.yaml from overlay.yaml; return one line per change."""
    if folder.resolve() == ROOT and not (folder / params_layers.OVERLAY).is_file():
        files.write_atomic(folder / "dvc.yaml", dvc_yaml.main_dvc_yaml_text())
        return ["dvc.yaml written"]
    composed, text = _compose_project(folder)
    changes = params_writer.write_and_diff_params(folder / "params.yaml", text)
    write_dvc_yaml_files(folder, composed.stages)
    return changes


def project_texts_from_overlay(folder: Path) -> dict[str, str]:
    composed, text = _compose_project(folder)
    run = composed.document.data["run"]
    stages = dvc_yaml.build_stage_entries(composed.stages)
    return {"params.yaml": text} | dvc_yaml.study_dvc_yaml_texts(stages, run)


def _compose_project(folder: Path) -> tuple[params_layers.ComposedParams, str]:
    base = params_layers.load_root_layer(SHIPPED)
    overlay = params_layers.load_overlay_layer(folder, base)
    composed = params_layers.compose_layers([base, overlay], SHIPPED)
    origin = params_writer.ParamsOrigin(
        params_layers.OVERLAY, SHIPPED_PARAMS_LABEL, "params.schema.json", folder
    )
    return composed, params_writer.params_text(composed, origin)


def write_dvc_yaml_files(folder: Path, stages: Sequence[str] | None) -> None:
    """Write the dvc.yaml files of a run folder; delete those of stages that it no longer has."""
    run = load_yaml_document(folder / "params.yaml").data["run"]
    texts = dvc_yaml.study_dvc_yaml_texts(dvc_yaml.build_stage_entries(stages), run)
    for file in folder.glob("steps/*/dvc.yaml"):
        if file.relative_to(folder).as_posix() not in texts:
            file.unlink()
    for name, text in texts.items():
        files.write_atomic(folder / name, text)


def explain_stale_results(question_round: QuestionRound) -> str:
    """Return why the results in a round's folder are not current; "" if they are."""
    folder = question_round.folder
    if not (folder / COMPARE_JSON_FILE).is_file():
        return f"{folder / COMPARE_JSON_FILE} does not exist; run `{question_round.command}`"
    now = load_yaml_document(folder / "params.yaml").data
    if changes := list(params_writer.list_changes(question_round.compose().document.data, now)):
        more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
        return f"this run has other settings, {changes[0]}{more}"
    ran = read_dvc_locks(folder)
    compared, copied = ran.get("compare", {}), ran.get("numbers", {})
    files_of_run = (*compared.get("deps", ()), *copied.get("outs", ()))
    hashes = {file["path"]: file.get("md5") for file in files_of_run}
    for path in (Path("params.yaml"), COMPARE_JSON_FILE, ITEMS_FILE):
        if hashes.get(str(path)) != files.file_checksum(folder / path, "md5"):
            reason = f"{path} is not what the stages compare and numbers saw"
            return f"{reason}; run `{question_round.command}`"
    return ""


def store_results(question_round: QuestionRound) -> Path:
    """Copy a round's current results to pipelines/results/; return the file."""
    question = question_round.question
    if reason := explain_stale_results(question_round):
        raise UserError(f"{question.results_path}: left as it is: {reason}")
    numbers = read_json(question_round.folder / COMPARE_JSON_FILE)
    origin = read_json(question_round.folder / ASKED_FILE)
    question.update_results_file(question_round.results_key, {ASKED_KEY: origin} | numbers)
    if not numbers.keys().isdisjoint(SECTIONS.values()):  # without claims there are no items
        copy_items_to_results(question_round, question_round.folder / ITEMS_FILE)
    return question.results_path


def begin_question(name: str, root: Path = CURRENT_FOLDER) -> Path:
    # Raises UserError, and leaves no file, for a used name, and if the question cannot be composed
    # over the params.yaml here.
    refuse_invalid_study_name(name)
    path = root / PIPELINES / OWN_QUESTIONS_FOLDER / f"{name}.yaml"
    if path.exists():
        raise UserError(f"{path}: is there already; take another name")
    if path.name == papers.PAPER_FILE:
        raise UserError(f"{path}: is the name of a paper's file; take another name")
    study = read_study(load_yaml_document(root / "params.yaml"))
    if not study.methods:
        raise UserError.at("params.yaml: methods", found="none", allowed="a project with methods")
    usual = [name for name in USUAL_METHODS if name in study.methods]
    methods = usual or list(study.run.methods or study.methods)[:1]
    stages = [name for name in NEW_STAGES if name not in LISTS or getattr(study.run, LISTS[name])]
    names = {"methods": ", ".join(methods), "stages": ", ".join(stages), "last": methods[-1]}
    files.write_atomic(path, NEW_QUESTION.format(**names))
    try:
        composed = QuestionFile(root, f"{OWN_QUESTIONS_FOLDER}/{name}").rounds[0].compose()
        check.check_without_data(composed.document, composed.all_stages)
    except BaseException:
        path.unlink()
        raise
    return path


def refuse_invalid_study_name(name: str) -> None:
    if not STUDY_NAME_PATTERN.fullmatch(name) or keyword.iskeyword(name):
        allowed = "small letters, digits and _, beginning with a letter"
        raise UserError(f"found the name {name!r}; allowed: {allowed}")


def check_and_add_problems(question: QuestionFile, problems: list[str]) -> Iterator[str]:
    """Check all rounds and presets of a question; yield result lines, collect ``problems``."""
    # A round gets all checks of ``moecore check``, and a small step of methods that it does not
    # run. Presets, which may be combined, are only read.
    try:
        question.check_world_baseline()
    except UserError as error:
        problems.append(str(error))
    for question_round in question.rounds:
        try:
            yield f"{question_round.name}: {_check_and_describe_round(question_round)}"
        except UserError as error:
            problems.append(str(error))
    for name in question.presets:
        try:
            read_study(question.rounds[0].compose([name]).document)
        except UserError as error:
            problems.append(str(error))
    if question.presets:
        yield f"{question.name}: {len(question.presets)} presets"


def _check_and_describe_round(question_round: QuestionRound) -> str:
    """Return "in order", and whether data are missing; UserError lists what is wrong."""
    document, _, stages = question_round.compose()
    home = question_round.folder
    if not home.is_dir():
        home = question_round.question.path.parent  # equally deep, so data paths are the same
    try:
        study = check.check_study_document(document, stages, home, unanswerable_claims).study
        data = ""
    except check.MissingDataError:
        study = read_study(document)
        data = ", but its data are not here"
    unrun = tuple(name for name in study.methods if name not in study.run.methods)
    untried = study.model_copy(update={"run": study.run.model_copy(update={"methods": unrun})})
    if faults := check.format_misfits(document, trial_rules.trial_step_misfits(untried)):
        raise UserError("\n".join(faults))
    return f"in order{data}"


METHODS = "methods"
EXAMPLE = "-S 'methods.vmoe.router.k=[1,2,4]'"
NON_NAME_LETTERS = re.compile("[^a-z0-9]+")
OWN_DATA_TEMPLATE = Path(__file__).with_name("own_data.yaml")
OWN_DATA_STAGES = ("prepare", "teacher_router", "pretrain", "routing", "measure", "compare")
MAX_SAMPLED_PICTURES = 200  # pictures whose size and colour are read, evenly spread
MIN_PER_CLASS = 3  # pictures: to train, to validate, to test
MIN_SIZE = 32
MAX_SIZE = 64  # pixels: a CPU trains on them in minutes
PATCHES = 8  # per side
MAX_BATCH = 64
MAX_EPOCHS = 10
MIN_STEPS = 1200  # 90 pictures of three drawn shapes reach 90 % test accuracy
MAX_STEPS = 6000
POSSIBLE_SHOTS = (1, 5, 10, 25)


def derive_params_from_pictures(folder: Path) -> str:
    root = find_raw_folder(str(folder), "the folder with the class folders").resolve()
    train = root / "train"
    if not train.is_dir():
        train = root
    classes = image_files_source.list_class_folders(train)
    files = image_files_source.list_labelled_images(root, train, classes)
    sizes = np.bincount(files.labels)
    if sizes.min() < MIN_PER_CLASS:
        problem = f"{sizes.min()} pictures"
        allowed = f"{MIN_PER_CLASS} or more per class; add some, or remove the folder"
        raise UserError.at(train / classes[sizes.argmin()], found=problem, allowed=allowed)
    side, channels = _median_side_and_channels(files.paths)
    number = len(files.paths)
    size = min(max(round(side / PATCHES) * PATCHES, MIN_SIZE), MAX_SIZE)
    # Every class needs a picture in each split
    test = max(0.2, math.ceil(100 * len(classes) / number) / 100)
    validation = max(len(classes), round(0.1 * number))
    source = ImageFolder(root=str(root), size=size, test=test, validation=validation)
    counts = source.describe().check_has_no_problem().counts["train"]
    images = sum(counts)
    batch = min(MAX_BATCH, max(1, images // 4))
    per_epoch = images // batch
    numbers = {"size": size, "min_size": MIN_SIZE, "max_size": MAX_SIZE, "patch": size // PATCHES}
    numbers |= {"channels": channels, "test": test, "validation": validation, "train": images}
    numbers |= {"batch": batch, "max_batch": MAX_BATCH, "classes": len(classes)}
    return Template(OWN_DATA_TEMPLATE.read_text(encoding="utf-8")).substitute(
        numbers,
        root=json.dumps(str(root), ensure_ascii=False),
        side=f"{side:g}",
        epochs=min(MAX_EPOCHS, max(1, MAX_STEPS // per_epoch)),
        updates=MIN_STEPS // MAX_EPOCHS if per_epoch * MAX_EPOCHS < MIN_STEPS else "null",
        shots=[shots for shots in POSSIBLE_SHOTS if shots <= min(counts)],
        smallest=min(counts),
    )


def _median_side_and_channels(paths: list[Path]) -> tuple[float, int]:
    """Return the median of the shorter sides (pixels), and 1 channel if all are grey."""
    sides = []
    channels = 1
    for path in paths[:: math.ceil(len(paths) / MAX_SAMPLED_PICTURES)]:
        try:
            pixels = decode.decode_image(path, MIN_SIZE, 3)
        except decode.UnreadableImage as error:
            raise UserError(f"{path}: {error}; repair it, or remove it") from None
        if (pixels != pixels[:1]).any():
            channels = 3
        with Image.open(path, formats=decode.FORMATS) as image:  # reads the header alone
            sides.append(min(image.size))
    return median(sides), channels


class SweepAxis(NamedTuple):
    """One axis of a sweep, from ``-S methods.METHOD.KEY=[…]``: key and values."""

    key: str
    values: list[Any]

    def method_suffix(self, number: int) -> str:
        """Return a method's suffix for the value at index ``number``, such as k2 for k = 2."""
        value = self.values[number]
        if isinstance(value, dict | list):
            value = value.get("kind", number) if isinstance(value, dict) else number
        letters = NON_NAME_LETTERS.sub("_", json.dumps(value).lower().replace("-", "m")).strip("_")
        joint = "" if letters[:1].isdigit() else "_"
        return f"{self.key.rpartition('.')[2]}{joint}{letters}"


def write_data_or_sweep_run(data: Path | None, sets: Sequence[str], is_sweep: bool) -> Path:
    # data: a folder of pictures; None: the run is of the params.yaml here. sets: values as for
    # ``-S``; with ``is_sweep``, lists below ``methods.`` are the axes of a grid.
    path = CURRENT_FOLDER / "params.yaml"
    name = "sweep"
    if data is not None:
        path = OWN_DATA_TEMPLATE
        text = derive_params_from_pictures(data)
        name = f"data.{NON_NAME_LETTERS.sub('_', data.resolve().name.lower())}"
        stages = OWN_DATA_STAGES
    else:
        load_yaml_document(path)  # says where there is no project
        text = path.read_text(encoding="utf-8")
        stages = params_layers.list_dvc_stages(CURRENT_FOLDER)
    grid: dict[str, list[str]] = {}
    if is_sweep:
        text, grid, suffix = _add_sweep(text, str(path), sets)
        name += f".{suffix}"
    elif sets:
        text = params_writer.apply_assignments(text, sets)
    folder = CURRENT_FOLDER / RUNS / name
    with project_record.hold_project_lock(folder / project_record.LOCK):
        write_atomic(folder / "params.yaml", text)
        write_dvc_yaml_files(folder, stages)
        # A project and its runs share a cache
        config = dvc_yaml.RUN_CONFIG if (CURRENT_FOLDER / ".dvc").is_dir() else dvc_yaml.CONFIG
        write_atomic(folder / ".dvc/config", config + dvc_yaml.WITHOUT_GIT)
    _refuse_equal_methods(folder / "params.yaml", [*chain.from_iterable(grid.values())])
    return folder


def _add_sweep(text: str, path: str, sets: Sequence[str]) -> tuple[str, dict[str, list[str]], str]:
    """Return params.yaml with a method per grid point, method → its points, the sweep's name."""
    values, swept = _split_assignments(parse_yaml_document(text, path).data, sets)
    text = params_writer.apply_assignments(text, values)
    document = parse_yaml_document(text, path)
    present = document.data.get(METHODS, {})
    assignments = []
    grid: dict[str, list[str]] = {}
    for method, axes in swept.items():
        settings = document.get([METHODS, method])
        for point in product(*(range(len(axis.values)) for axis in axes)):
            chosen = list(zip(axes, point, strict=True))
            name = "_".join([method, *(axis.method_suffix(number) for axis, number in chosen)])
            if name in present or name in grid.get(method, ()):
                key = f"{METHODS}.{method}"
                problem = f"two methods that would be called {name}"
                raise UserError.at(key, found=problem, allowed="values with other names")
            grid.setdefault(method, []).append(name)
            assignments.append(f"{METHODS}.{name}={json.dumps(settings)}")
            for axis, number in chosen:
                assignments.append(f"{METHODS}.{name}.{axis.key}={json.dumps(axis.values[number])}")
    names = list(dict.fromkeys([*document.data["run"][METHODS], *swept]))
    names = [point for name in names for point in grid.get(name, [name])]
    assignments.append(f"run.{METHODS}={json.dumps(names)}")
    keys = [axis.key.rpartition(".")[2] for axes in swept.values() for axis in axes]
    return params_writer.apply_assignments(text, assignments), grid, "_".join([*swept, *keys])


def _split_assignments(
    data: Any, sets: Sequence[str]
) -> tuple[list[str], dict[str, list[SweepAxis]]]:
    """Return the assignments of single values, and method → axes of the sweep."""
    values = []
    swept: dict[str, list[SweepAxis]] = {}
    for assignment in sets:
        name, _, text = assignment.partition("=")
        value = parse_yaml_document(text, f"-S {assignment}").data if text.strip() else None
        section, method, key = [*name.strip().split(".", 2), "", ""][:3]
        if not isinstance(value, list) or isinstance(_value_at(data, (section, method)), list):
            values.append(assignment)  # run.seeds and run.methods are lists
        elif section != METHODS or not key:
            allowed = f"lists for keys below {METHODS}.NAME, such as {EXAMPLE}"
            raise UserError.at(f"-S {name}", found=f"{len(value)} values", allowed=allowed)
        elif len(value) < 2 or key in [axis.key for axis in swept.get(method, ())]:
            problem = "the key twice, or fewer than two values"
            raise UserError.at(f"-S {name}", found=problem, allowed="one list of two or more")
        else:
            swept.setdefault(method, []).append(SweepAxis(key, value))
    if not swept:
        raise UserError.at("--sweep", found="no list to sweep over", allowed=f"such as {EXAMPLE}")
    return values, swept


def _value_at(data: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        data = dict_or_empty(data).get(key)
    return data


def _refuse_equal_methods(path: Path, grid: Sequence[str]) -> None:
    study = read_study(load_yaml_document(path))
    for name, other in product(grid, study.run.methods):
        if name != other and study.methods[name] == study.methods[other]:
            problem = f"the same settings as {other} has"
            raise UserError.at(f"{METHODS}.{name}", found=problem, allowed="values that differ")
