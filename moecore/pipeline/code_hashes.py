"""The folder artifacts/code/: hashes of source files and of settings, which stages depend on.

One file for every script, measurement, method and section of params.yaml::

    stages/pretrain.json        what importing moecore/stages/pretrain.py reaches
    measure/invariance.json     the same of that measurement's file, and the parts its section names
                                (measure/my_lab.brightness.json of one from outside)
    methods/vmoe.json           the parts of methods.vmoe and of model: what such a model is made of
    sections/teacher.json       the parts that a section names; data has one file for each entry
    settings/data.pretrain.json the values of a key that stages name under ``params``

The settings have hashes because DVC's run cache leaves every setting called ``size`` or ``nfiles``
out of its key, at any depth (``exclude`` in dvc/stage/cache.py): after an edit of only
``data.pretrain.size`` it would bring back the data of the size before.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moecore.core.files import whole_folder, write_json
from moecore.core.outside_packages import allow_packages, allowed_packages, list_allowed_modules
from moecore.core.source_layout import CODE, ROOT
from moecore.pipeline.code_hashes import (
    DECIDING,
    hash_files,
    import_closure,
    outside_module_files,
    part_files,
)
from moecore.study.document import Document, load_yaml_document

COMPARE = "compare"  # the one script whose result is what the room `report` makes
NOT_READ_WHOLE = ("packages", "run", "data", "methods", "claims", "questions")  # by no stage


def hash_code_files(document: Document, root: Path = ROOT) -> dict[str, dict[str, str]]:
    """Name below artifacts/code/ → path of a source file → sha256, of all that a stage can need.

    Raises UserError where a file is no Python, or run.methods names what is not under methods.
    """
    allow_packages(document.packages, document.folders)
    return {
        name: hash_files(files, root, shown=name == f"stages/{COMPARE}.json")
        for name, files in _files_by_name(document, root)
    }


def write_code(params: str | Path, folder: Path = CODE, root: Path = ROOT) -> None:
    """Write the whole folder, in the place of what was there."""
    document = load_yaml_document(str(params))
    hashed = hash_code_files(document, root)
    with whole_folder(folder) as temporary:
        for name, hashes in hashed.items():
            write_json(temporary / name, hashes)
        for key, digest in hash_settings(document).items():
            write_json(temporary / f"settings/{key}.json", {"sha256": digest})


def hash_settings(document: Document) -> dict[str, str]:
    """Return key → sha256 of its values, for every key that a stage can name under ``params``."""
    params = document.data
    keys = [(key,) for key in params if key not in NOT_READ_WHOLE]
    keys += [(key, name) for key in ("data", *allowed_packages()) for name in params.get(key) or ()]
    keys += [("run", "methods"), *(("methods", name) for name in document.get(("run", "methods")))]
    if "calibrator" in (params.get("calibrate") or ()):
        keys += [("calibrate", "calibrator")]
    return {".".join(key): _hash_values(document.get(key)) for key in keys}


def _hash_values(value: Any) -> str:
    """Return a hash that is equal for equal values: 1 and 1.0 are."""
    text = json.dumps(_with_whole_numbers(value), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _with_whole_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_whole_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _files_by_name(document: Document, root: Path) -> Iterator[tuple[str, set[Path]]]:
    params = document.data
    tasks = _task_files(params.get("data"), root)
    for script in sorted((root / "moecore/stages").glob("[a-z]*.py")):
        files = import_closure(script.relative_to(root), root) | tasks
        if script.stem == COMPARE:
            for file in (script.relative_to(root), *_report_files(root)):
                files |= import_closure(file, root, (*DECIDING, "report"))
        yield f"stages/{script.stem}.json", files
    for method in document.get(("run", "methods")):
        parts = part_files(document.get(("methods", method)), root, "methods")
        model = part_files(params.get("model"), root, "model")
        yield f"methods/{method}.json", parts | model
    for key, section in params.items():
        if key in (*NOT_READ_WHOLE, "model") and key != "data":
            continue
        if key == "data":
            for phase, source in section.items():
                yield f"sections/data.{phase}.json", part_files(source, root, key)
            continue
        if key in allowed_packages() and isinstance(section, dict):
            for name, settings in section.items():
                files = part_files(settings, root, name)
                for file in outside_module_files(f"{key}.{name}", root):
                    files |= import_closure(file, root)
                yield f"measure/{key}.{name}.json", files
            continue
        parts = part_files(section, root, key)
        yield f"sections/{key}.json", parts
        measurement = Path("moecore/measure", f"{key}.py")
        if (root / measurement).is_file():
            yield f"measure/{key}.json", import_closure(measurement, root) | parts


def _report_files(root: Path) -> list[Path]:
    """The files that say what the page shows: they are found by their folder, not imported."""
    folders = ("report/measures", "report/pictures", "measure")
    own = [file for name in folders for file in (root / "moecore" / name).glob("[a-z]*.py")]
    others = list_allowed_modules(_shows_results)
    return [
        *(file.relative_to(root) for file in sorted(own)),
        *(file for name in others for file in outside_module_files(name, root)),
    ]


def _shows_results(file: Path) -> bool:
    """Return whether the page may show what a module from outside declares."""
    text = file.read_text(encoding="utf-8")
    return "(Measurement):" in text or "\nSHOWN = " in text


def _task_files(data: Any, root: Path) -> set[Path]:
    """The tasks that the data may have: its sources import them. Every script may use them.

    Of sources from outside all that they import, as nothing says which of it is a task.
    """
    files = part_files(data, root, "data")
    return {
        file for file in files if file.parts[1] == "tasks" or file.parts[0] in allowed_packages()
    }
