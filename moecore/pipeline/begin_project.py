"""A project of one's own: a folder that uses an installed moecore, as ``moecore new`` writes it.

Its files come from project_template/, in whose names ``dot_`` stands for a dot and ``my_study`` for
the project, and from the params.yaml, dvc.yaml and studies of this version.
"""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

from moecore.core.files import UserError, write_whole
from moecore.core.source_layout import SHIPPED
from moecore.pipeline.dvc import (
    WITHOUT_GIT,
    list_our_stages,
    stage_definitions,
    study_dvc_yaml_texts,
)
from moecore.pipeline.project import moecore_requirement, write_answers
from moecore.pipeline.study_runs import project_texts_from_overlay, refuse_study_name
from moecore.study.document import parse_yaml_document
from moecore.study.layers import OVERLAY, Composed
from moecore.study.params_file import (
    dump_inline_yaml,
    overlay_text,
    project_params_text,
    rewrite_data_paths,
)
from moecore.study.questions import QuestionFile, find_old_study, find_question

TEMPLATE = Path(__file__).with_name("project_template")
TEMPLATE_NAME = "my_study"
REQUIREMENT = "moecore>=VERSION"  # in the template's pyproject.toml
QUICK_QUESTION = "ours/quick"
MAIN_STUDY = "main"  # the params.yaml and dvc.yaml of this repository itself
DVC_HEAD = "# Written by `moecore new` and `moecore upgrade` from moecore's stages.\n"
EDITED = ("README.md", "pyproject.toml", "src/", "tests/")  # the user's from the first day on
DVC_CONFIG = ".dvc/config"
QUICK_LOOK = "moecore_quick"
BEGUN = ".begun"  # a folder in which a project is written before it is moved to its place


def begin_project(name: str, folder: Path, study: str, is_overlay: bool) -> None:
    """Write a new project into ``folder``, which does not exist or is empty.

    is_overlay: its params.yaml is written from an overlay.yaml. Raises UserError, and leaves
    nothing, where the name, the study or the folder is not in order.
    """
    refuse_study_name(name)
    if importlib.util.find_spec(name):
        raise UserError(
            f"found the name {name!r}, which Python finds already; allowed: another one"
        )
    if study != MAIN_STUDY:
        study = find_shipped_question(study).name
    if is_overlay and study == MAIN_STUDY:
        raise UserError(f"--overlay: {MAIN_STUDY} has none; allowed with another study")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is not empty; take an empty folder, or a name that is new")
    part = folder / BEGUN
    try:
        write_texts(part, template_texts(name, is_of_user=True))
        file, text = "params.yaml", shipped_params_text(study)
        values = parse_yaml_document(text).data
        if is_overlay:
            file, text = OVERLAY, overlay_text(compose_shipped_question(study))
        write_whole(part / file, _add_example(text, values, name))
        texts = upgradable_project_texts(part, name, study)
        write_texts(part, texts)
        write_answers(part, name, study, texts)
        _begin_repository(part, folder)
        for path in part.iterdir():
            path.rename(folder / path.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_quick_look(place: Path) -> Path:
    """Write the study ``quick`` into a folder of its own below ``place``; returns the folder."""
    folder = place / QUICK_LOOK
    template = template_texts(QUICK_LOOK, is_of_user=False)
    texts = {path: template[path] for path in (DVC_CONFIG, ".gitignore")}
    texts[DVC_CONFIG] += WITHOUT_GIT
    texts["params.yaml"] = shipped_params_text(QUICK_QUESTION)
    write_texts(folder, texts | _dvc_texts(folder, QUICK_QUESTION))
    return folder


def find_shipped_question(name: str) -> QuestionFile:
    """Return a question of this version, also by its name without the folder.

    Raises UserError where there is none.
    """
    try:
        return find_question(SHIPPED, name)
    except UserError as error:
        raise UserError(f"--from: {error}, or {MAIN_STUDY}") from None


def compose_shipped_question(name: str) -> Composed:
    """Return the first round of a question of this version, or what a study of 0.2 became."""
    old = find_old_study(SHIPPED, name)
    return (old or find_shipped_question(name).round(1)).compose()


def shipped_params_text(study: str) -> str:
    """Return the params.yaml of a question of ours, or the main one, for a project to edit."""
    if study == MAIN_STUDY:
        return rewrite_data_paths((SHIPPED / "params.yaml").read_text(encoding="utf-8"))
    return project_params_text(compose_shipped_question(study))


def upgradable_project_texts(folder: Path, name: str, study: str) -> dict[str, str]:
    """Return path → text of the files that are as moecore writes them, also after an upgrade.

    folder: the project, of which its overlay is read where it has one, and whose stages stay, as
    its params.yaml has settings of these.
    """
    texts = template_texts(name, is_of_user=False)
    return texts | _dvc_texts(folder, study, list_our_stages(folder))


def _dvc_texts(folder: Path, study: str, stages: Sequence[str] = ()) -> dict[str, str]:
    """Return path → text of dvc.yaml, and of params.yaml where that comes from an overlay.

    stages: their names; none for those of the study.
    """
    if (folder / OVERLAY).is_file():
        return project_texts_from_overlay(folder)
    if study == MAIN_STUDY:
        text = (SHIPPED / "dvc.yaml").read_text(encoding="utf-8")
        if not stages or {*stages} == {*parse_yaml_document(text).data["stages"]}:
            return {"dvc.yaml": text}
        return study_dvc_yaml_texts(stage_definitions(stages), {}, DVC_HEAD)
    composed = compose_shipped_question(study)
    definitions = stage_definitions(stages or composed.stages)
    return study_dvc_yaml_texts(definitions, composed.document.data["run"], DVC_HEAD)


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the files below ``folder``."""
    for path, text in texts.items():
        write_whole(folder / path, text)


def template_texts(name: str, is_of_user: bool) -> dict[str, str]:
    """Return path → text of the files of the template that are, or are not, the user's to edit."""
    texts = {}
    for file in sorted(TEMPLATE.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            path = file.relative_to(TEMPLATE).as_posix()
            text = file.read_text(encoding="utf-8")
            text = text.replace(REQUIREMENT, moecore_requirement())
            if path.startswith(EDITED) == is_of_user:
                path = path.replace("dot_", ".").replace(TEMPLATE_NAME, name)
                texts[path] = text.replace(TEMPLATE_NAME, name)
    return texts


def _add_example(text: str, study: Mapping[str, Any], name: str) -> str:
    """Return a params.yaml, or an overlay, that lists the project's package; where it says which
    methods there are, and vmoe is one, also ``cosine``: vmoe with the project's router.

    study: what the whole params.yaml says.
    """
    text = re.sub("^run:", f"packages: [{name}]  # in src/\n\nrun:", text, flags=re.M)
    sections = parse_yaml_document(text).data
    if "vmoe" not in sections.get("methods", ()) or "methods" not in sections["run"]:
        return text
    vmoe = study["methods"]["vmoe"]
    router = {"kind": f"{name}.cosine", "k": vmoe["router"]["k"]}
    importance = {"kind": "importance", "weight": 0.005}
    cosine = dump_inline_yaml({"cosine": vmoe | {"router": router, "regularizers": [importance]}})
    text = re.sub(r"methods: \[[^]]*", r"\g<0>, cosine", text, count=1)  # those of run
    return re.sub("^methods:.*\n", rf"\g<0>{indent(cosine, '  ')}\n", text, flags=re.M)


def _begin_repository(part: Path, folder: Path) -> None:
    """Begin a git repository, unless ``folder`` lies in one; DVC is told where there is no git."""
    above = folder.resolve().parents
    if any((parent / ".git").exists() for parent in above):
        return
    if shutil.which("git"):
        subprocess.run(["git", "init", "--quiet", str(part)], check=True)
    else:
        config = part / DVC_CONFIG
        write_whole(config, config.read_text(encoding="utf-8") + WITHOUT_GIT)
