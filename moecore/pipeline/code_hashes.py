"""Hashes of source files and settings in artifacts/code/, by which DVC decides what reruns.

There is one file per script, measurement, method and section of params.yaml::

    stages/pretrain.json        the files that moecore/stages/pretrain.py imports
    measure/invariance.json     the same for a measurement, and the parts in its section
                                (measure/my_lab.brightness.json for an outside measurement)
    methods/vmoe.json           the parts of methods.vmoe and of model
    sections/teacher.json       the parts that a section names; data has one file per entry
    settings/data.pretrain.json the values of a key that stages name under ``params``

Settings are hashed because DVC's run cache leaves every setting called ``size`` or ``nfiles`` out
of its key, at any depth (``exclude`` in the module dvc.stage.cache): after an edit of only
``data.pretrain.size`` it would restore the data of the previous size.

DVC does not follow imports, so the stage ``code`` hashes the files that a script's imports reach,
and the files of the parts that params.yaml names by ``kind``. Imports are read, never run, in
moecore and in allowed packages. Python is hashed by its syntax tree, so comments and formatting
rerun nothing; other files by their bytes.
"""

import ast
import gc
import hashlib
import json
import platform
import string
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from moecore.core import source_layout
from moecore.core.files import UserError, atomic_folder, file_checksum, write_atomic, write_json
from moecore.core.source_layout import (
    FAMILY_FOLDERS,
    HASHES_DIR,
    OUR_PACKAGE,
    PUBLIC_FAMILIES,
    ROOT,
    allow_packages,
    allowed_packages,
)
from moecore.run import stage_inputs as source_hashes
from moecore.run.stage_inputs import locate_source
from moecore.study import run_and_claims, stages
from moecore.study.yaml_document import YamlDocument, load_yaml_document

DIGEST_FILE = Path(".state/code.sha256")
COMPARE = "compare"  # the only script whose result is made by the room `report`
KEYS_WITHOUT_HASH_FILE = ("packages", "run", "data", "model", "methods", "claims", "questions")
# Rooms whose code decides a result; an edit of other rooms reruns nothing
DECIDING = ("core", "statistics", "tasks", "nn", "data", "attacks", "training", "measure", "brain")
OUTSIDE_PACKAGE_LABEL = "outside"  # instead of a room: packages that params.yaml lists
FOLLOWED_BUT_NOT_HASHED = ("run", "parts.py")  # decide no result, but their imports do
FAMILY_MODULES = tuple(f"moecore/{name}" for name in PUBLIC_FAMILIES)
PUBLIC_MODULES = ("moecore", "moecore/parts", *FAMILY_MODULES)  # pass on names of other modules
FAMILY_AT_KEY = {  # the family of a part at this key, if two families have a kind of that name
    "router": "routers",
    "calibrator": "calibrators",
    "model": "backbones",
    "teacher": "teachers",
}


def compute_code_hashes(document: YamlDocument, root: Path = ROOT) -> dict[str, dict[str, str]]:
    """Hash sources per script, method, …: file below artifacts/code/ → {source file: sha256}."""
    allow_packages(document.packages, document.folders)
    gc.disable()  # it would visit every node of the syntax trees, for half of the time
    try:
        return {
            name: hash_each_file(files, root, shown=name == f"stages/{COMPARE}.json")
            for name, files in _sources_by_hash_file(document, root)
        }
    finally:
        gc.enable()


def write_all_hashes(params: str | Path, folder: Path = HASHES_DIR, root: Path = ROOT) -> None:
    document = load_yaml_document(str(params))
    hashed = compute_code_hashes(document, root)
    with atomic_folder(folder) as temporary:
        for name, hashes in hashed.items():
            write_json(temporary / name, hashes)
        for key, digest in hash_settings_by_key(document).items():
            write_json(temporary / f"settings/{key}.json", {"sha256": digest})


def digest_code_inputs(document: YamlDocument, root: Path | None = None) -> str:
    """Return one sha256 of all source and settings that the stage ``code`` reads."""
    root = root or ROOT
    allow_packages(document.packages, document.folders)
    outside = []
    for name in allowed_packages():
        with suppress(ValueError):  # not installed: the check says so
            outside.append(source_layout.package_folder(name))
    folders = [root / OUR_PACKAGE, root / "stages", *outside]
    files = {file for folder in folders for file in folder.rglob("*")}
    files = {file for file in files if "__pycache__" not in file.parts}
    files |= {Path(document.path), Path("dvc.yaml")}
    libraries = [f"{name} {version(name)}" for name in ("torch", "timm", "pydantic")]
    return _sha256_of_lines([platform.python_version(), *libraries, *_checksum_lines(files)])


def is_code_up_to_date(inputs: str, document: YamlDocument) -> bool:
    """Return whether artifacts/code is up to date; inputs: from ``digest_code_inputs`` now."""
    # Importing torch and parsing all source would take longer than the rest of an idle ``dvc
    # repro``. Raw data, which the check also reads, do not matter once all data are prepared.
    if not DIGEST_FILE.is_file() or DIGEST_FILE.read_bytes() != _compute_code_stage_digest(inputs):
        return False
    phases = document.data.get("data") or ()
    return all(Path("artifacts/data", phase, "card.json").is_file() for phase in phases)


def store_code_digest(inputs: str) -> None:
    """Store a digest for ``is_code_up_to_date``; inputs: ``digest_code_inputs`` before hashing."""
    write_atomic(DIGEST_FILE, _compute_code_stage_digest(inputs))


def _compute_code_stage_digest(inputs: str) -> bytes:
    return f"{inputs} {_sha256_of_lines(_checksum_lines(HASHES_DIR.rglob('*.json')))}\n".encode()


def _checksum_lines(files: Iterable[Path]) -> list[str]:
    return [f"{file} {file_checksum(file)}" for file in sorted(files) if file.is_file()]


def _sha256_of_lines(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def hash_settings_by_key(document: YamlDocument) -> dict[str, str]:
    """Return key → sha256 of its value, for each key of params.yaml that a stage reads."""
    run = document.data.get("run") or {}
    sources = document.data.get("data")
    methods = run.get("methods")
    measured = [*(run.get("measurements") or ()), *(run.get("calculations") or ())]
    items = {"key": sources, "method": methods, "what": measured, "phase": run.get("phases")}
    hashes = {}
    rows = [row for row in stages.STAGE_ROWS if "deps" not in row.entry]
    for template in {key for row in rows for key in row.reads}:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name]
        for value in items[names[0]] or () if names else ("",):
            key = template.format(**dict.fromkeys(names, value))
            with suppress(UserError):  # the file may lack keys of stages that it does not have
                value = _convert_whole_floats(document.get(key.split(".")))
                hashes[key] = _sha256_of_lines([json.dumps(value, sort_keys=True)])
    return hashes


def _convert_whole_floats(value: Any) -> Any:
    """Return a nested value with floats such as 1.0 as integers, so that both hash equally."""
    if isinstance(value, dict):
        return {str(key): _convert_whole_floats(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_convert_whole_floats(inner) for inner in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _sources_by_hash_file(document: YamlDocument, root: Path) -> Iterator[tuple[str, set[Path]]]:
    params = document.data
    sources = list_section_part_files(params.get("data"), root, "data")
    # The tasks' files that sources import; for outside sources all imported files
    packages = allowed_packages()
    tasks = {file for file in sources if file.parts[1] == "tasks" or file.parts[0] in packages}
    for script in sorted((root / "moecore/stages").glob("[a-z]*.py")):
        files = import_closure(script.relative_to(root), root) | tasks
        if script.stem == COMPARE:
            for file in (script.relative_to(root), *_measurement_and_picture_files(root)):
                files |= import_closure(file, root, (*DECIDING, "report"))
        yield f"stages/{script.stem}.json", files
    of_model = list_section_part_files(params.get("model"), root, "model")
    for method in document.get(("run", "methods")):
        parts = list_section_part_files(document.get(("methods", method)), root, "methods")
        yield f"methods/{method}.json", parts | of_model
    for phase, source in (params.get("data") or {}).items():
        yield f"sections/data.{phase}.json", list_section_part_files(source, root, "data")
    for key, section in params.items():
        if key in KEYS_WITHOUT_HASH_FILE:
            continue
        if key in packages and isinstance(section, dict):
            for name, settings in section.items():
                files = list_section_part_files(settings, root, name)
                for file in find_outside_module_file(f"{key}.{name}", root):
                    files |= import_closure(file, root)
                yield f"measure/{key}.{name}.json", files
            continue
        parts = list_section_part_files(section, root, key)
        yield f"sections/{key}.json", parts
        measurement = Path("moecore/measure", f"{key}.py")
        if (root / measurement).is_file():
            yield f"measure/{key}.json", import_closure(measurement, root) | parts


def _measurement_and_picture_files(root: Path) -> list[Path]:
    folders = ("report/pictures", "measure")
    files = [file for name in folders for file in (root / "moecore" / name).glob("[a-z]*.py")]
    modules = source_layout.list_allowed_modules(_defines_measurement_or_pictures)
    return [
        *(file.relative_to(root) for file in sorted(files)),
        *(file for name in modules for file in find_outside_module_file(name, root)),
    ]


def _defines_measurement_or_pictures(file: Path) -> bool:
    text = file.read_text(encoding="utf-8")
    return run_and_claims.file_defines_measurement(file) or "\nPICTURES = " in text


def import_closure(
    path: str | Path, root: Path = ROOT, rooms: Collection[str] = DECIDING
) -> set[Path]:
    """Return ``path`` and all it imports below ``root``, also indirectly; of moecore: ``rooms``."""
    # rooms: top folders of moecore to follow. ``FOLLOWED_BUT_NOT_HASHED`` files are followed but
    # left out, as are ``__init__`` files with only a docstring. Of a family only the base class is
    # reached: params.yaml names the part. Other files in a module's folder (an atlas) belong to it.
    reached: set[Path] = set()
    waiting = [Path(path)]
    while waiting:
        file = waiting.pop()
        if file not in reached:
            reached.add(file)
            imported = _imported_files(file, root, allowed_packages())
            followed = (*rooms, "stages", *FOLLOWED_BUT_NOT_HASHED, OUTSIDE_PACKAGE_LABEL)
            waiting.extend(file for file in imported if _package_in_moecore(file) in followed)
    reached = {file for file in reached if _package_in_moecore(file) not in FOLLOWED_BUT_NOT_HASHED}
    folders = {file.parent for file in reached}
    return reached.union(*(_non_python_files(folder, root) for folder in folders))


def list_section_part_files(section: Any, root: Path = ROOT, under: str = "") -> set[Path]:
    """Return the files, with imports, of parts named by ``kind`` in a section of params.yaml."""
    # under: the key of ``section``, which decides if two families have a part of that name. A
    # ``kind`` without a file in a family (a plain choice) adds nothing: imports reach it.
    if isinstance(section, dict):
        nested = (list_section_part_files(value, root, str(key)) for key, value in section.items())
        files = set().union(*nested)
        kind = section.get("kind")
        if isinstance(kind, str) and "." in kind:
            named = find_outside_module_file(kind, root)
        else:
            paths = [Path("moecore", family, f"{kind}.py") for family in FAMILY_FOLDERS]
            existing = [path for path in paths if (root / path).is_file()]
            family = FAMILY_AT_KEY.get(under, under)
            named = [path for path in existing if path.parent.name == family] or existing
        return files.union(*(import_closure(file, root) for file in named))
    if isinstance(section, list):
        return set().union(*(list_section_part_files(value, root, under) for value in section))
    return set()


def find_outside_module_file(name: str, root: Path = ROOT) -> list[Path]:
    allowed = name.partition(".")[0] in allowed_packages()
    file = _module_file(name.replace(".", "/"), root) if allowed else None
    return [file] if file else []


def hash_each_file(files: Iterable[Path], root: Path = ROOT, shown: bool = False) -> dict[str, str]:
    """Return path → sha256; shown: include the texts in ``Metric`` calls that only pages show."""
    return {file.as_posix(): _code_hash(file, root, shown) for file in sorted(files)}


@cache
def _code_hash(file: Path, root: Path, shown: bool) -> str:
    if file.suffix != ".py" or (shown and _read_and_analyse_source(file, root).has_metrics):
        return source_hashes.hash_source_file(file, root, shown)
    return _read_and_analyse_source(file, root).syntax


def _package_in_moecore(file: Path) -> str:
    return file.parts[1] if file.parts[0] == OUR_PACKAGE else OUTSIDE_PACKAGE_LABEL


@cache
def _non_python_files(folder: Path, root: Path) -> frozenset[Path]:
    data_files: set[Path] = set()
    home = locate_source(folder, root)
    for path in home.iterdir():
        if path.name != "__pycache__" and not path.name.startswith(".") and path.suffix != ".pyi":
            files = [path, *path.rglob("*")]
            if not any(file.suffix == ".py" for file in files):
                data_files |= {
                    folder / file.relative_to(home)
                    for file in files
                    if file.is_file() and "__pycache__" not in file.parts
                }
    recorded = source_hashes.read_wheel_hashes(folder.parts[0])
    return frozenset(data_files & set(recorded) if recorded else data_files)


@cache
def _imported_files(file: Path, root: Path, packages: tuple[str, ...]) -> tuple[Path, ...]:
    if file.suffix != ".py":
        return ()
    files: dict[Path, None] = {}
    for module, name in _read_and_analyse_source(file, root).imports:
        for package, member in _defining_modules(module, name, root):
            if package.split("/")[0] in (OUR_PACKAGE, *packages):
                files |= dict.fromkeys(_files_run_by_import(package, member, root))
    return tuple(files)


def _defining_modules(package: str, name: str, root: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) where an imported name is defined; public modules only re-export it."""
    if f"{package}/{name}" in PUBLIC_MODULES:
        package = f"{package}/{name}"
        name = ""
    is_public = package in PUBLIC_MODULES
    if not is_public or (name and _module_file(f"{package}/{name}", root)):
        yield package, name
        return
    is_family = package in FAMILY_MODULES
    file = Path(package, "__init__.pyi") if is_family else _module_file(package, root)
    imports = _read_and_analyse_source(file, root).imports if file else ()
    origins = [pair for pair in imports if name and pair[1] == name] or imports
    for pair in origins:  # those of moecore itself are families
        yield from _defining_modules(*pair, root)


def _files_run_by_import(package: str, name: str, root: Path) -> Iterator[Path]:
    """Yield the files that an import runs: of the package, its parents, and a submodule."""
    # For a family, which offers its parts by class name, the files of all parts.
    segments = [*package.split("/"), name] if name else package.split("/")
    if "/".join(segments[1:]) in FAMILY_FOLDERS:
        folder = Path(*segments)
        yield from sorted(folder / part.name for part in (root / folder).glob("*.py"))
    for count in range(1, len(segments) + 1):
        if file := _module_file("/".join(segments[:count]), root):
            yield file


class _SourceAnalysis(NamedTuple):
    imports: tuple[tuple[str, str], ...]  # path of a module, imported name or ""
    syntax: str  # hash of the syntax tree
    has_code: bool  # more than docstrings
    has_metrics: bool  # whose words the page shows


@cache
def _read_and_analyse_source(file: Path, root: Path) -> _SourceAnalysis:
    return _analyse_source(source_hashes.read_source_text(file, root), file)


@cache
def _analyse_source(text: str, file: Path) -> _SourceAnalysis:
    tree = source_hashes.parse_source(text, file)
    has_code = any(not isinstance(node, ast.Expr) for node in tree.body)
    imports: list[tuple[str, str]] = []
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            imports += [(alias.name.replace(".", "/"), "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = file.parent.parts[: len(file.parent.parts) - node.level + 1]
            segments = [*(above if node.level else ()), *([node.module] if node.module else [])]
            module = ".".join(segments).replace(".", "/")
            imports += [(module, alias.name) for alias in node.names]
    has_metrics = "Metric(" in text or "OnPage(" in text
    return _SourceAnalysis(tuple(imports), source_hashes.hash_syntax(tree), has_code, has_metrics)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all statements in a node, including those in functions and branches."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(node, name, ()):
            yield statement
            yield from _statements(statement)


@cache
def _module_file(name: str, root: Path) -> Path | None:
    """Return the file of a module, or of a package with code; else None."""
    module = Path(f"{name}.py")
    package = Path(name, "__init__.py")
    if not locate_source(package, root).is_file():
        return module if locate_source(module, root).is_file() else None
    return package if _read_and_analyse_source(package, root).has_code else None
