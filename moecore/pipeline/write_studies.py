"""The studies under pipelines/: folders whose params.yaml and dvc.yaml are written, not edited."""

import keyword
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from moecore.core.files import UserError, write_whole
from moecore.core.source_layout import SHIPPED
from moecore.pipeline.dvc_file import (
    stage_definitions,
    study_dvc_yaml_texts,
    write_study_dvc_files,
)
from moecore.study.reading.document import load_yaml_document
from moecore.study.reading.overlay import OVERLAY, load_study_presets, resolve_overlay
from moecore.study.writing.write_params import params_text, write_params

WORKING_FOLDER = Path()  # the working folder
STUDY_NAME = re.compile(r"[a-z][a-z0-9_]*")
NEW_OVERLAY = """\
# What this study asks. All that is not said here is as in ../../params.yaml.
run: {methods: [dense, vmoe], seeds: [0, 1, 2], phases: [pretrain]}
teacher: {kind: no_teacher}  # leave this out where a method needs one: each seed has its own
stages: [prepare, teacher, teacher_router, pretrain, measure, compare]
"""
NEW_README = """\
# {name}: the question, in a line

The paper's numbers beside ours, what it cost, and:

```
moecore study run pipelines/{name}
```
"""


def list_studies(root: Path = WORKING_FOLDER) -> list[Path]:
    """The folders of all studies, and of a project that is one itself."""
    overlays = [*root.glob(OVERLAY), *sorted((root / "pipelines").glob(f"*/{OVERLAY}"))]
    return [path.parent for path in overlays]


def list_presets_of_study(folder: Path) -> list[str]:
    """The names of a study's presets. Raises UserError where ``folder`` is no study."""
    _refuse_other_folder(folder)
    return list(load_study_presets(folder))


def write_study(folder: Path, presets: Sequence[str] = ()) -> list[str]:
    """Write a study's files; returns a line for every value of params.yaml that changes.

    Raises UserError, and writes nothing, where the overlay or a preset is not in order.
    """
    _refuse_other_folder(folder)
    here = folder.resolve()
    home = Path(os.path.relpath(here.parents[1])) if here.parent.name == "pipelines" else None
    root = home or SHIPPED  # a project's own overlay is laid over what this version has
    changed = list(write_params(folder, root, presets))
    write_study_dvc_files(folder, resolve_overlay(folder, root).stages, home)
    return changed


def project_texts_from_overlay(folder: Path) -> dict[str, str]:
    """Return path → text of what ``write_study`` writes of a project with an overlay of its own."""
    resolved = resolve_overlay(folder, SHIPPED)
    run = resolved.document.data["run"]
    dvc_texts = study_dvc_yaml_texts(stage_definitions(resolved.stages), run)
    return {"params.yaml": params_text(folder, SHIPPED)} | dvc_texts


def begin_study(name: str, root: Path = WORKING_FOLDER) -> Path:
    """Begin the study ``name``; returns its overlay. Raises UserError for a name that is taken, or
    where it cannot be written over the params.yaml here, and leaves no folder then.
    """
    folder = root / "pipelines" / name
    refuse_study_name(name)
    if folder.exists():
        raise UserError(f"{folder}: is there already; take another name")
    load_yaml_document(root / "params.yaml")  # nothing is written where there is no project
    try:
        for file, text in {OVERLAY: NEW_OVERLAY, "README.md": NEW_README.format(name=name)}.items():
            write_whole(folder / file, text)
        write_study(folder)
    except BaseException:
        shutil.rmtree(folder)
        raise
    return folder / OVERLAY


def refuse_study_name(name: str) -> None:
    """Raise UserError where a study or a project cannot have this name."""
    if not STUDY_NAME.fullmatch(name) or keyword.iskeyword(name):
        allowed = "small letters, digits and _, beginning with a letter"
        raise UserError(f"found the name {name!r}; allowed: {allowed}")


def _refuse_other_folder(folder: Path) -> None:
    if not (folder / OVERLAY).is_file():
        known = ", ".join(str(path) for path in list_studies()) or "none here; start from the root"
        raise UserError(f"{folder}: found no {OVERLAY}; allowed: {known}")
