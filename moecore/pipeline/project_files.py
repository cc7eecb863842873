"""The files of a user's project, as ``moecore new`` and ``moecore upgrade`` write them.

They come from project_template/, where ``dot_`` in a name means a dot and ``my_study`` the project,
from the params.yaml and questions of this version, and from the table of stages.
"""

import difflib
import importlib.util
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from textwrap import indent
from typing import Any

from moecore.core.files import UserError, write_atomic
from moecore.core.source_layout import SHIPPED, list_dvc_files
from moecore.pipeline import dvc_yaml, project_record, run_folders
from moecore.pipeline.plan import print_plan
from moecore.pipeline.run_folders import project_texts_from_overlay, refuse_invalid_study_name
from moecore.study import params_writer, yaml_document
from moecore.study.params_layers import OVERLAY, ComposedParams
from moecore.study.questions import PIPELINES, QuestionFile, find_question, find_round_by_old_name
from moecore.study.stages import STAGES

TEMPLATE = Path(__file__).with_name("project_template")
TEMPLATE_NAME = "my_study"
TEMPLATE_REQUIREMENT = "moecore>=VERSION"  # in the template's pyproject.toml
TEMPLATE_RUNNER_LINE = "runs-on: ubuntu-latest"  # in the template's workflow
SELF_HOSTED_RUNNER = "runs-on: self-hosted  # has the folder or wheel that pyproject.toml requires"
QUICK_QUESTION = "ours/quick"
MAIN_STUDY = "main"  # the params.yaml and dvc.yaml of this repository itself
DVC_HEAD = "# Written by `moecore new` and `moecore upgrade` from moecore's stages.\n"
USER_EDITED_PATHS = ("README.md", "pyproject.toml", "src/", "tests/")  # written once
DVC_CONFIG = ".dvc/config"
QUICK_PROJECT_FOLDER = "moecore_quick"
UNFINISHED_FOLDER = ".begun"  # a project is written there before it is moved to its place
CURRENT_FOLDER = Path()
IGNORE_CACHES = shutil.ignore_patterns("__pycache__")
REQUIREMENT_PATTERN = re.compile(r"(?<=[\"'])moecore *[<>=~!@][^\"']*")


def begin_project(name: str, folder: Path, study: str, is_overlay: bool, data: Path | None) -> None:
    """Write a new project into ``folder``, which must be missing or empty."""
    # study: a shipped question, or main. is_overlay: params.yaml is written from an overlay.yaml.
    # data: a folder of pictures that params.yaml is derived from.
    refuse_invalid_study_name(name)
    if importlib.util.find_spec(name):
        raise UserError(f"found the name {name!r}, which Python finds already; allowed: another")
    if study != MAIN_STUDY:
        study = find_shipped_question(study).name
    if is_overlay and study == MAIN_STUDY:
        raise UserError(f"--overlay: {MAIN_STUDY} has none; allowed with another study")
    if data is not None and (is_overlay or study != QUICK_QUESTION):
        raise UserError("--data: found it together with --from or --overlay; allowed: alone")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is not empty; take an empty folder, or a name that is new")
    part = folder / UNFINISHED_FOLDER
    try:
        write_or_delete_files(part, render_project_template(name, is_of_user=True))
        file = "params.yaml"
        text = shipped_params_text(study)
        stages: Sequence[str] = ()
        if data is not None:
            text = run_folders.derive_params_from_pictures(data)
            stages = run_folders.OWN_DATA_STAGES
        values = yaml_document.parse_yaml_document(text).data
        if is_overlay:
            file = OVERLAY
            text = params_writer.overlay_text(compose_shipped_question(study))
        write_atomic(part / file, _add_example_method(text, values, name, is_run=data is None))
        for package in values.get("packages", ()):
            home = find_shipped_question(study).path.parent / package
            shutil.copytree(home, part / "src" / package, ignore=IGNORE_CACHES)
        texts = render_project_template(name, is_of_user=False) | _dvc_texts(part, study, stages)
        write_or_delete_files(part, texts)
        project_record.write_answers(part, name, study, texts)
        if not any((above / ".git").exists() for above in folder.resolve().parents):
            if shutil.which("git"):
                subprocess.run(["git", "init", "--quiet", str(part)], check=True)
            else:
                config = (part / DVC_CONFIG).read_text(encoding="utf-8")
                write_atomic(part / DVC_CONFIG, config + dvc_yaml.WITHOUT_GIT)
        for path in part.iterdir():
            path.rename(folder / path.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def describe_first_run(place: Path) -> str:
    enter = f"cd {shlex.quote(str(place))} && "
    return f"`{enter}moecore run`, or `{enter}make repro`, which first installs it all in .venv/"


def write_quick_project(place: Path) -> Path:
    folder = place / QUICK_PROJECT_FOLDER
    template = render_project_template(QUICK_PROJECT_FOLDER, is_of_user=False)
    texts = {path: template[path] for path in (DVC_CONFIG, ".gitignore")}
    texts[DVC_CONFIG] += dvc_yaml.WITHOUT_GIT
    texts["params.yaml"] = shipped_params_text(QUICK_QUESTION)
    write_or_delete_files(folder, texts | _dvc_texts(folder, QUICK_QUESTION))
    return folder


def find_shipped_question(name: str) -> QuestionFile:
    try:
        return find_question(SHIPPED, name)
    except UserError as error:
        raise UserError(f"--from: {error}, or {MAIN_STUDY}") from None


def compose_shipped_question(name: str) -> ComposedParams:
    return (find_round_by_old_name(SHIPPED, name) or find_shipped_question(name).round(1)).compose()


def shipped_params_text(study: str) -> str:
    if study == MAIN_STUDY:
        text = (SHIPPED / "params.yaml").read_text(encoding="utf-8")
        return params_writer.rewrite_data_paths(text)
    return params_writer.project_params_text(compose_shipped_question(study))


def upgradable_project_texts(name: str, study: str, added: Sequence[str]) -> dict[str, str]:
    # Its overlay.yaml, if any, is read; stages in its dvc.yaml that this version has stay there, as
    # its params.yaml has their settings. added: more stages.
    if added and Path(OVERLAY).is_file():
        raise UserError.at("--stage", found=OVERLAY, allowed=f"with `stages` of {OVERLAY} instead")
    if unknown := [stage for stage in added if stage not in STAGES]:
        raise UserError.at("--stage", found=unknown[0], allowed=", ".join(STAGES))
    stages: list[str] = []
    for file in list_dvc_files(CURRENT_FOLDER):
        data = yaml_document.load_yaml_document(file).data
        stages += (isinstance(data, dict) and data.get("stages")) or ()
    ours = [stage for stage in stages if stage in STAGES]
    if added:
        ours = [stage for stage in STAGES if stage in (*ours, *added)]
    return render_project_template(name, is_of_user=False) | _dvc_texts(CURRENT_FOLDER, study, ours)


def _dvc_texts(folder: Path, study: str, stages: Sequence[str] = ()) -> dict[str, str]:
    """Return path → text of dvc.yaml; with an overlay.yaml also of params.yaml."""
    if (folder / OVERLAY).is_file():
        return project_texts_from_overlay(folder)
    if study == MAIN_STUDY:
        text = dvc_yaml.main_dvc_yaml_text()
        if not stages or {*stages} == {*yaml_document.parse_yaml_document(text).data["stages"]}:
            return {"dvc.yaml": text}
        return dvc_yaml.study_dvc_yaml_texts(dvc_yaml.build_stage_entries(stages), {}, DVC_HEAD)
    composed = compose_shipped_question(study)
    definitions = dvc_yaml.build_stage_entries(stages or composed.stages)
    return dvc_yaml.study_dvc_yaml_texts(definitions, composed.document.data["run"], DVC_HEAD)


def write_or_delete_files(folder: Path, texts: Mapping[str, str | None]) -> None:
    for path, text in texts.items():
        if text is None:
            (folder / path).unlink(missing_ok=True)
        else:
            write_atomic(folder / path, text)


def render_project_template(name: str, is_of_user: bool) -> dict[str, str]:
    """Return path → text of the template's files that users edit, or that moecore upgrades."""
    requirement = project_record.moecore_requirement()
    texts = {}
    for file in sorted(TEMPLATE.rglob("*")):
        path = file.relative_to(TEMPLATE).as_posix()
        is_file = file.is_file() and "__pycache__" not in file.parts
        if is_file and path.startswith(USER_EDITED_PATHS) == is_of_user:
            text = file.read_text(encoding="utf-8").replace(TEMPLATE_NAME, name)
            text = text.replace(TEMPLATE_REQUIREMENT, requirement)
            if "file://" in requirement:  # which machines of a service do not have
                text = text.replace(TEMPLATE_RUNNER_LINE, SELF_HOSTED_RUNNER)
            texts[path.replace("dot_", ".").replace(TEMPLATE_NAME, name)] = text
    return texts


def _add_example_method(text: str, study: Mapping[str, Any], name: str, is_run: bool) -> str:
    """Return a params.yaml with the package and method ``cosine``, in run.methods if ``is_run``."""
    # If it lists methods with vmoe, ``cosine`` is added: vmoe with the project's router. study: the
    # values of the complete params.yaml. is_run: ``cosine`` is also added to run.methods.
    packages = ", ".join([name, *study.get("packages", ())])
    text = re.sub("^packages:.*\n+", "", text, flags=re.M)
    text = re.sub("^run:", f"packages: [{packages}]  # in src/\n\nrun:", text, flags=re.M)
    sections = yaml_document.parse_yaml_document(text).data
    if "vmoe" not in sections.get("methods", ()) or "methods" not in sections["run"]:
        return text
    vmoe = study["methods"]["vmoe"]
    router = {"kind": f"{name}.cosine", "k": vmoe["router"]["k"]}
    section = vmoe | {"router": router, "regularizers": [{"kind": "importance", "weight": 0.005}]}
    cosine = params_writer.dump_inline_yaml({"cosine": section})
    if is_run:
        text = re.sub(r"methods: \[[^]]*", r"\g<0>, cosine", text, count=1)  # of the section run
    return re.sub("^methods:.*\n", rf"\g<0>{indent(cosine, '  ')}\n", text, flags=re.M)


def upgrade_project(
    answers: project_record.ProjectAnswers, is_written: bool, more: Sequence[str]
) -> None:
    """Print an upgrade's changes and reruns; write them if ``is_written``; more: stages to add."""
    changes = _texts_with_renamed_keys(answers)
    with _temporarily_replaced_files(changes):  # an overlay must be valid to be read
        texts = upgradable_project_texts(answers.name, answers.study, more)
        written, edited = _split_texts_by_user_edits(answers, texts)
    pyproject = Path("pyproject.toml")
    if before := _read_if_exists(pyproject):
        requirement = project_record.moecore_requirement()
        if (after := REQUIREMENT_PATTERN.sub(lambda _: requirement, before)) != before:
            changes[str(pyproject)] = after
    changes |= written
    installed = version("moecore")
    if answers.moecore != installed:
        print(f"moecore {answers.moecore} → {installed}")
    for path, text in {**changes, **edited}.items():
        lines = (_read_if_exists(Path(path)) or "").splitlines(True)
        now = (text or "").splitlines(True)
        names = f"{path} (here)", f"{path} (new)"
        print("".join(difflib.unified_diff(lines, now, *names)), end="")
    for path in edited:
        print(f"{path}: edited in this project and stays so; the diff above is for you to take")
    if not changes and answers.moecore == installed:
        print(f"moecore {installed} wrote this project, and nothing is to be written again")
        return
    with _temporarily_replaced_files(changes):
        print_plan()
    if is_written:
        write_or_delete_files(CURRENT_FOLDER, changes)
        project_record.write_answers(CURRENT_FOLDER, answers.name, answers.study, texts)
        print("written")
    else:
        print("nothing is written yet; to write it: moecore upgrade --yes")


def _texts_with_renamed_keys(answers: project_record.ProjectAnswers) -> dict[str, str | None]:
    """Return path → new text of settings files with keys renamed since the project's version."""
    since = project_record.version_numbers(answers.moecore)
    renamed = params_writer.RENAMED_KEYS
    steps = [step for step in renamed if project_record.version_numbers(step.version) > since]
    texts: dict[str, str | None] = {}
    for path in (Path(OVERLAY), Path("params.yaml"), *sorted(PIPELINES.glob("*/*.yaml"))):
        if (before := _read_if_exists(path)) is not None:
            after = params_writer.rename_keys_in_text(before, steps, str(path))
            if after != before:
                texts[path.as_posix()] = after
    return texts


def _split_texts_by_user_edits(
    answers: project_record.ProjectAnswers, texts: Mapping[str, str]
) -> tuple[dict[str, str | None], dict[str, str | None]]:
    """Return path → text to write, and the same for files that the user edited; None: remove."""
    written: dict[str, str | None] = {}
    edited: dict[str, str | None] = {}
    for path in {**answers.files, **texts}:
        before = _read_if_exists(CURRENT_FOLDER / path)
        text = texts.get(path)
        if text == before:
            continue
        written_hash = answers.files.get(path)
        current = None if before is None else project_record.hash_text(before)
        # `moecore study write` overwrites the files of an overlay
        is_free = Path(OVERLAY).is_file() and Path(path).name in ("params.yaml", "dvc.yaml")
        if is_free or written_hash == current:
            written[path] = text
        elif text is None or project_record.hash_text(text) != written_hash:
            edited[path] = text
    return written, edited


@contextmanager
def _temporarily_replaced_files(texts: Mapping[str, str | None]) -> Iterator[None]:
    """Replace files by ``texts`` within the block, and restore them afterwards."""
    before = {path: _read_if_exists(Path(path)) for path in texts}
    try:
        write_or_delete_files(CURRENT_FOLDER, texts)
        yield
    finally:
        write_or_delete_files(CURRENT_FOLDER, before)


def _read_if_exists(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
