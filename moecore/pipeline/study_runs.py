"""The questions of pipelines/: their check, their folders below .runs/, and their results.

A run folder is a DVC project of its own, with the project's cache, and ignored by the project's
git. DVC refuses files that git ignores, so it is a git repository, too: its last commit is what was
written, and ``dvc params diff`` says how its params.yaml differs from that.
"""

import keyword
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from moecore.core.files import (
    UserError,
    file_checksum,
    read_json,
    whole_file,
    write_json,
    write_whole,
)
from moecore.core.source_layout import ROOT, SHIPPED
from moecore.pipeline import dvc
from moecore.pipeline.project import LOCK, hold_project
from moecore.report.claims.evaluation import SECTIONS
from moecore.report.claims.records import ASKED, ITEMS, NUMBERS, committed_at, run_git
from moecore.report.tables.metrics_by_method import unfit_metric_problems
from moecore.run.history_file import read_dvc_locks
from moecore.study import layers
from moecore.study.check import MissingData, check_document, check_study_document, format_misfits
from moecore.study.document import load_yaml_document
from moecore.study.papers import PAPER_FILE
from moecore.study.params_file import ParamsOrigin, list_changes, params_text, write_params
from moecore.study.questions import PIPELINES, QuestionFile, Round
from moecore.study.study import read_study
from moecore.study.trial_rules import trial_step_misfits

HERE = Path()
OUR_QUESTIONS = "ours"
STUDY_NAME = re.compile(r"[a-z][a-z0-9_]*")
SHIPPED_PARAMS = "moecore's params.yaml"
ASKED_FILE = "asked.json"  # of a run folder: the commit that asked, when the folder was written
IGNORED = "artifacts/\nreports/\n.state/\ndvc_plots/\n.dvc/tmp/\n"
COMMITTED = ("params.yaml", "dvc.yaml", "steps", ".dvc/config")
NEW_QUESTION = """\
# All that is not said here is as in the world, where `world:` names one, else as in params.yaml.
question: what is asked, in one line?
answer: ""
seeds: 0-2
run: {phases: [pretrain]}
methods: [dense, vmoe]  # or a mapping: {vmoe_16: {from: vmoe, experts: {number: 16}}}
teacher: {kind: no_teacher}  # leave this out where a method needs one: each seed has its own
stages: [prepare, teacher, teacher_router, pretrain, measure, compare]
"""


def write_run(one: Round, presets: Sequence[str] = ()) -> list[str]:
    """Write the folder in which a round runs; return a line for every value that changes in it.

    Raises UserError, and writes nothing, where the question or a preset is not in order, or a
    process runs stages there.
    """
    root, folder = one.question.root, one.folder
    composed = one.compose(presets)
    up = Path("../..")
    origin = ParamsOrigin(
        str(PIPELINES / f"{one.question.name}.yaml"),
        "params.yaml",
        str(up / "params.schema.json"),
        root / PIPELINES,
    )
    text = params_text(composed, origin, presets)
    is_new = not (folder / "params.yaml").is_file()
    with hold_project(folder / LOCK):
        changes = write_params(folder / "params.yaml", text)
        write_dvc_files(folder, composed)
        if shutil.which("git"):
            write_whole(folder / ".dvc/config", dvc.RUN_CONFIG)
            _commit_written(folder)
        else:
            write_whole(folder / ".dvc/config", dvc.RUN_CONFIG + dvc.WITHOUT_GIT)
        if changes or not (folder / ASKED_FILE).is_file() or not (folder / NUMBERS).is_file():
            files = [path.relative_to(root) for path in one.question.asking_files]
            asked = {"commit": committed_at(root, *files), "file": files[0].as_posix()}
            write_json(folder / ASKED_FILE, asked)
    return ["written"] if is_new else changes


def write_project(folder: Path = HERE) -> list[str]:
    """Write params.yaml and dvc.yaml of a project that has an overlay.yaml; return what changes.

    In moecore's own clone: its dvc.yaml, from the table of stages.
    """
    if folder.resolve() == ROOT and not (folder / layers.OVERLAY).is_file():
        write_whole(folder / "dvc.yaml", dvc.main_dvc_yaml_text())
        return ["dvc.yaml written"]
    composed = compose_project(folder)
    changes = write_params(folder / "params.yaml", params_text(composed, _overlay_origin(folder)))
    write_dvc_files(folder, composed)
    return changes


def project_texts_from_overlay(folder: Path) -> dict[str, str]:
    """Return path → text of what ``write_project`` writes."""
    composed = compose_project(folder)
    texts = dvc.study_dvc_yaml_texts(
        dvc.stage_definitions(composed.stages), composed.document.data["run"]
    )
    return {"params.yaml": params_text(composed, _overlay_origin(folder))} | texts


def compose_project(folder: Path) -> layers.Composed:
    """Return the params.yaml of a project whose overlay.yaml lies over that of this version."""
    base = layers.load_root_layer(SHIPPED)
    return layers.compose_layers([base, layers.load_overlay_layer(folder, base)], SHIPPED)


def _overlay_origin(folder: Path) -> ParamsOrigin:
    return ParamsOrigin(layers.OVERLAY, SHIPPED_PARAMS, "params.schema.json", folder)


def write_dvc_files(folder: Path, composed: layers.Composed) -> None:
    """Write dvc.yaml, or several where there are many stages, and remove those of before."""
    run = load_yaml_document(folder / "params.yaml").data["run"]
    texts = dvc.study_dvc_yaml_texts(dvc.stage_definitions(composed.stages), run)
    for file in folder.glob("steps/*/dvc.yaml"):
        if file.relative_to(folder).as_posix() not in texts:
            file.unlink()
    for name, text in texts.items():
        write_whole(folder / name, text)


def why_results_stay(one: Round) -> str:
    """Return why the numbers in a round's folder are not its results; "" where they are."""
    folder = one.folder
    if not (folder / NUMBERS).is_file():
        return f"{folder / NUMBERS} does not exist; run `{one.command}`"
    now = load_yaml_document(folder / "params.yaml").data
    if changes := list(list_changes(one.compose().document.data, now)):
        more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
        return f"this run has other settings, {changes[0]}{more}"
    ran = read_dvc_locks(folder)
    files = [*ran.get("compare", {}).get("deps", ()), *ran.get("numbers", {}).get("outs", ())]
    hashes = {file["path"]: file.get("md5") for file in files}
    for path in (Path("params.yaml"), NUMBERS, ITEMS):
        if hashes.get(str(path)) != file_checksum(folder / path, "md5"):
            return f"{path} is not what the stages compare and numbers saw; run `{one.command}`"
    return ""


def keep_results(one: Round) -> Path:
    """Copy a round's numbers, with the commit that asked, and their items to pipelines/results/.

    Raises UserError where they are not those of the whole round.
    """
    if reason := why_results_stay(one):
        raise UserError(f"{one.results}: left as it is: {reason}")
    numbers = read_json(one.folder / NUMBERS)
    write_json(one.results, {ASKED: read_json(one.folder / ASKED_FILE)} | numbers)
    if not numbers.keys().isdisjoint(SECTIONS.values()):  # without claims there are no items
        with whole_file(one.results.with_suffix(ITEMS.suffix)) as temporary:
            shutil.copyfile(one.folder / ITEMS, temporary)
    return one.results


def begin_question(name: str, root: Path = HERE) -> Path:
    """Begin the question ``name``; return its file. Raises UserError for a name that is taken, or
    where it cannot be composed over the params.yaml here, and leaves no file then.
    """
    refuse_study_name(name)
    path = root / PIPELINES / OUR_QUESTIONS / f"{name}.yaml"
    if path.exists():
        raise UserError(f"{path}: is there already; take another name")
    if path.name == PAPER_FILE:
        raise UserError(f"{path}: is the name of a paper's file; take another name")
    layers.load_root_layer(root)  # nothing is written where there is no project
    write_whole(path, NEW_QUESTION)
    try:
        composed = QuestionFile(root, f"{OUR_QUESTIONS}/{name}").rounds[0].compose()
        check_document(composed.document, composed.all_stages)
    except BaseException:
        path.unlink()
        raise
    return path


def refuse_study_name(name: str) -> None:
    """Raise UserError where a question or a project cannot have this name."""
    if not STUDY_NAME.fullmatch(name) or keyword.iskeyword(name):
        allowed = "small letters, digits and _, beginning with a letter"
        raise UserError(f"found the name {name!r}; allowed: {allowed}")


def _commit_written(folder: Path) -> None:
    """Commit what was written in a run folder, which is made a git repository of its own."""
    if not (folder / ".git").is_dir():
        run_git(folder, "init", "--quiet", "--template=")
        write_whole(folder / ".git/info/exclude", IGNORED)
    names = [name for name in COMMITTED if (folder / name).exists()]
    run_git(folder, "add", "--all", "--", *names)
    author = ("-c", "user.name=moecore", "-c", "user.email=moecore@localhost")
    words = ("commit", "--quiet", "--no-verify", "--no-gpg-sign", "-m", "written by moecore")
    run_git(folder, *author, *words)


def check_question(question: QuestionFile, problems: list[str]) -> Iterator[str]:
    """Yield a line for each round of a question, and one for its presets; fill ``problems``.

    Of a round everything is tried that ``moecore check`` tries, and a small step of the methods
    that it does not run, too; of presets, which may lie over each other, whether they can be read.
    """
    for one in question.rounds:
        try:
            yield f"{one.name}: {_check_round(one)}"
        except UserError as error:
            problems.append(str(error))
    for name in question.presets:
        try:
            read_study(question.rounds[0].compose([name]).document)
        except UserError as error:
            problems.append(str(error))
    if question.presets:
        yield f"{question.name}: {len(question.presets)} presets"


def _check_round(one: Round) -> str:
    """Return whether a round is in order; raises UserError where it is not.

    Paths of data count from a folder as deep as that in which it runs.
    """
    document, _, stages = one.compose()
    home = one.folder if one.folder.is_dir() else one.question.path.parent
    try:
        study = check_study_document(document, stages, home, unfit_metric_problems).study
        data = ""
    except MissingData:
        study = read_study(document)
        data = ", but its data are not here"
    others = tuple(name for name in study.methods if name not in study.run.methods)
    untried = study.model_copy(update={"run": study.run.model_copy(update={"methods": others})})
    if faults := format_misfits(document, trial_step_misfits(untried)):
        raise UserError("\n".join(faults))
    return f"in order{data}"
