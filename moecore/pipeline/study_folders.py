"""The studies under pipelines/: folders whose params.yaml and dvc.yaml are written, not edited."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from moecore.core.files import UserError, write_whole
from moecore.pipeline.dvc_file import write_dvc_files
from moecore.study.reading.overlay import OVERLAY, load_presets, resolve_overlay
from moecore.study.writing.write_params import write_params

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
    """The folders of all studies."""
    return [path.parent for path in sorted((root / "pipelines").glob(f"*/{OVERLAY}"))]


def list_presets(folder: Path) -> list[str]:
    """The names of a study's presets. Raises UserError where ``folder`` is no study."""
    _refuse_other_folder(folder)
    return list(load_presets(folder))


def write_study(folder: Path, presets: Sequence[str] = ()) -> list[str]:
    """Write a study's files; returns a line for every value of params.yaml that changes.

    Raises UserError, and writes nothing, where the overlay or a preset is not in order.
    """
    _refuse_other_folder(folder)
    root = Path(os.path.relpath(folder.resolve().parents[1]))
    changed = list(write_params(folder, root, presets))
    write_dvc_files(folder, resolve_overlay(folder, root).stages, root)
    return changed


def begin_study(name: str, root: Path = WORKING_FOLDER) -> Path:
    """Begin the study ``name``; returns its overlay. Raises UserError for a name that is taken."""
    folder = root / "pipelines" / name
    if not STUDY_NAME.fullmatch(name):
        allowed = "small letters, digits and _, beginning with a letter"
        raise UserError(f"found the name {name!r}; allowed: {allowed}")
    if folder.exists():
        raise UserError(f"{folder}: is there already; take another name")
    for file, text in {OVERLAY: NEW_OVERLAY, "README.md": NEW_README.format(name=name)}.items():
        write_whole(folder / file, text)
    write_study(folder)
    return folder / OVERLAY


def _refuse_other_folder(folder: Path) -> None:
    if not (folder / OVERLAY).is_file():
        known = ", ".join(str(path) for path in list_studies()) or "none here; start from the root"
        raise UserError(f"{folder}: found no {OVERLAY}; allowed: {known}")
