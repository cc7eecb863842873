"""Hashes of the inputs of a running stage (settings, code, artifacts), to refuse edits of them.

DVC hashes settings and files after the command has ended, and code when the stage ``code`` runs at
the start of the pipeline. A result could be cached under inputs that it was not made with. So a
stage compares its inputs after its imports, at every checkpoint, and at its end.

Python is hashed by its syntax tree: comments, docstrings and formatting change no hash. Words of
metrics (moecore/measure/values.py) change only the hash for `compare`, which shows them.
"""

import ast
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import cache
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import Any

from moecore.core.config import Config
from moecore.core.files import UserError, file_checksum, read_json, to_jsonable
from moecore.core.source_layout import HASHES_DIR, OUR_PACKAGE, ROOT, allow_packages, package_folder
from moecore.run.history_file import flatten_keys
from moecore.study import params_reader, stages
from moecore.study.yaml_document import YamlDocument, load_yaml_document

RESUME_ADVICE = "undo the edit to resume this stage, or run again to use the new values"
IGNORED_FIELDS = ("ctx", "kind", "type_comment")  # redundant, or without effect
METRIC_TEXT_ARGUMENTS = ("label", "note", "paper", "mean", "chance")  # label comes first


def params_path() -> str:
    return os.environ.get("MOECORE_PARAMS") or "params.yaml"


def allow_params_packages() -> None:
    if Path(params_path()).is_file():
        document = load_yaml_document(params_path())
        allow_packages(document.packages, document.folders)


class StageInputs:
    def __init__(
        self,
        params: Config | None,
        artifacts: Iterable[str | Path],
        hash_files: Sequence[Path] = (),  # from ``list_code_hash_json_files``
        **item: object,  # values of the placeholders in keys of params.yaml, such as ``method``
    ) -> None:
        """Hash all inputs; UserError if code was edited after stage ``code`` hashed it."""
        self._recorded = {  # source file → the hash under which DVC caches the stage's result
            Path(name): digest for file in hash_files for name, digest in read_json(file).items()
        }
        self._verified: dict[Path, str] = {}  # checksum of the content that had the recorded hash
        for file, (content, hashes) in _imported_by_server.items():
            if file in self._recorded and self._recorded[file] not in hashes:
                raise _edited_source_error(file)
            self._verified[file] = content
        self.refuse_edited_code()
        self._artifacts = [*artifacts, *hash_files]
        self._hashes = hash_input_files(self._artifacts)
        self._params = params
        self._item = item
        self._text: bytes | None = None  # of params.yaml, when its values were last equal

    def combined_hash(self) -> str:
        """Return a hash of settings, artifacts and code; work resumes only with an equal hash."""
        assert self._params is not None, "a stage that is resumed has settings"
        text = json.dumps([self._params.model_dump(mode="json"), self._hashes], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def refuse_edited_code(self) -> None:
        """Raise UserError if the syntax tree of a source file has changed."""
        for file, digest in self._recorded.items():
            try:
                content = file_checksum(locate_source(file))
            except OSError:
                raise _edited_source_error(file) from None
            if self._verified.get(file) != content:
                if digest not in _hash_without_and_with_texts(file):
                    raise _edited_source_error(file)
                self._verified[file] = content

    def refuse_edited_settings(self) -> None:
        path = Path(params_path())
        # Without params.yaml DVC caches no result.
        if self._params is None or not path.is_file():
            return
        if (text := path.read_bytes()) == self._text:
            return
        now = params_reader.read_stage_params(type(self._params), None, **self._item)
        for field, template in params_reader.params_keys_by_field(type(self._params)).items():
            key = template.format(**self._item)
            before = flatten_keys(to_jsonable(getattr(self._params, field)), key)
            _refuse_changed_values(before, flatten_keys(to_jsonable(getattr(now, field)), key))
        self._text = text

    def refuse_all_edits(self) -> None:
        self.refuse_edited_code()
        now = hash_input_files(self._artifacts)
        for file in {**self._hashes, **now}:
            if self._hashes.get(file) != now.get(file):
                raise UserError(f"{file}: was changed since this stage read it; {RESUME_ADVICE}")
        self.refuse_edited_settings()


def build_stage_inputs(
    stage: str,
    params: Config,
    artifacts: Sequence[str | Path],
    phase: str | None = None,
    method: str | None = None,
) -> StageInputs:
    """Return the hashed inputs of ``stage``, which may be the name of a measurement."""
    files = list_code_hash_json_files(stage, phase, method)
    return StageInputs(params, artifacts, files, method=method, data=phase)


def list_code_hash_json_files(
    stage: str, phase: str | None = None, method: str | None = None
) -> list[Path]:
    paths = stages.list_hash_files(stage, key=phase, method=method)
    script, *parts = [HASHES_DIR / path for path in paths]
    if not script.is_file():
        mend = "run `python -m moecore.stages.code`, which writes it"
        raise UserError(f"{script}: no such file; {mend}")
    files = [file for path in parts for file in (sorted(path.glob("*.json")) or [path])]
    return [script, *(file for file in files if file.is_file())]


def refuse_changed_document(before: YamlDocument) -> None:
    now = load_yaml_document(before.path)
    _refuse_changed_values(flatten_keys(before.data), flatten_keys(now.data))


def _refuse_changed_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key in {**before, **now}:
        if key in before and key in now and before[key] == now[key]:
            continue
        was, is_now = (repr(side[key]) if key in side else "missing" for side in (before, now))
        keys = [int(word) if word.isdigit() else word for word in key.split(".")]
        place = load_yaml_document(params_path()).place(keys)
        changed = f"was {was} when this stage read it, and is {is_now}"
        raise UserError(f"{place}: {key}: {changed}; {RESUME_ADVICE}")


def hash_input_files(inputs: Iterable[str | Path]) -> dict[str, str]:
    """Return path → sha256 of all files in ``inputs``; for prepared data only of card.json."""
    files: list[Path] = []
    for path in map(Path, inputs):
        if not path.exists():
            raise UserError(f"{path}: does not exist; run `dvc repro`, which makes it first")
        if (card := path / "card.json").is_file():
            files.append(card)
        else:
            files += [file for file in (path, *path.rglob("*")) if file.is_file()]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}


def hash_syntax(tree: ast.AST, shown: bool = False) -> str:
    """Return a syntax tree's sha256, equal on Python 3.11 to 3.13; ``shown``: with page texts."""
    # Ignored are statements that are only a string (docstrings), ``pass``, methods that only
    # `moecore check` calls (``_is_check_only_method``), descriptions of pydantic's ``Field``, and
    # unless ``shown`` the words of calls of ``Metric`` and all arguments of ``OnPage``.
    pieces: list[str] = []
    _add_node(tree, pieces.append, shown)
    return hashlib.sha256("".join(pieces).encode("ascii")).hexdigest()


def _add_node(node: Any, add: Callable[[str], None], shown: bool) -> None:
    """Pass a tree to ``add`` as texts: types, fields, constants; ``shown``: page texts, too."""
    if node.__class__ is ast.Call:
        node = _without_texts(node, shown)
    if node.__class__ is list:
        add("[")
        for item in node:
            if not _does_nothing(item):
                _add_node(item, add, shown)
        add("]")
    elif isinstance(node, ast.AST):
        if node.__class__ is ast.ClassDef:
            body = [item for item in node.body if not _is_check_only_method(item)]
            node = copy(node)
            node.body = body
        add(node.__class__.__name__)
        add("(")
        fields = node._fields
        if node.__class__ is ast.JoinedStr:  # Python 3.12 adds empty strings to some
            parts = [part for part in node.values if getattr(part, "value", None) != ""]
            _add_node(parts, add, shown)
            fields = ()
        for name in fields:
            value = getattr(node, name, None)
            # Versions of Python differ in their empty fields.
            if value is not None and value != [] and name not in IGNORED_FIELDS:
                add(name)
                add("=")
                _add_node(value, add, shown)
        add(")")
    else:
        add(ascii(node))
        add(",")


def _without_texts(call: ast.Call, shown: bool) -> ast.Call:
    """Return a call of ``Field``, ``Metric`` or ``OnPage`` without texts that change no result."""
    name = getattr(call.func, "id", "") or getattr(call.func, "attr", "")  # `parts.Metric`, too
    if name == "OnPage" and not shown:
        return ast.Call(call.func, [], [])
    first, left_out = 0, ()
    if name == "Field":
        left_out = ("description",)
    elif name == "Metric" and not shown:
        first, left_out = 1, METRIC_TEXT_ARGUMENTS
    keywords = [keyword for keyword in call.keywords if keyword.arg not in left_out]
    return ast.Call(call.func, call.args[first:], keywords)


def _is_check_only_method(item: Any) -> bool:
    if item.__class__ is not ast.FunctionDef or item.decorator_list:
        return False
    # Only `moecore check` calls them. The annotation tells them from other methods of these names.
    returned = getattr(item.returns, "id", "") or getattr(item.returns, "attr", "")
    return item.name in ("misfits", "remarks") and returned == "Misfits"


def _does_nothing(item: Any) -> bool:
    return item.__class__ is ast.Pass or (
        isinstance(item, ast.Expr)
        and isinstance(item.value, ast.Constant)
        and isinstance(item.value.value, str)
    )


def hash_source_file(file: Path, root: Path = ROOT, shown: bool = False) -> str:
    # shown: include texts that only pages show.
    if file.suffix == ".py":
        return hash_syntax(parse_source(read_source_text(file, root), file), shown)
    if recorded := read_wheel_hashes(file.parts[0]).get(file):
        return recorded
    try:
        return file_checksum(locate_source(file, root))
    except FileNotFoundError:
        raise UserError(f"{file}: no such file") from None


def locate_source(file: Path, root: Path = ROOT) -> Path:
    top, *inner = file.parts
    if top == OUR_PACKAGE:
        return root / file
    return package_folder(top).joinpath(*inner)


def read_source_text(file: Path, root: Path = ROOT) -> str:
    try:
        return locate_source(file, root).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file under {root}") from None


def parse_source(text: str, file: Path) -> ast.Module:
    try:
        return ast.parse(text, str(file))
    except SyntaxError as error:
        raise UserError(f"{file}:{error.lineno}: not valid Python: {error.msg}") from None


@cache
def read_wheel_hashes(package: str) -> dict[Path, str]:
    """Return the hash of each non-Python file that the RECORD of an installed package lists."""
    # Empty for moecore and for source trees. Files that a package writes into its folder at run
    # time are not in its RECORD.
    if package == OUR_PACKAGE:
        return {}
    return {
        Path(file): file.hash.value
        for name in packages_distributions().get(package, ())
        for file in distribution(name).files or ()
        if file.hash and file.parts[0] == package and file.suffix != ".py"
    }


# By file: a checksum of its bytes, and the hashes of the source, as in artifacts/code
_imported_by_server: dict[Path, tuple[str, tuple[str, str]]] = {}


def store_hashes_of_imported_sources() -> None:
    """Store the hashes of all imported moecore files, for stages forked from this process."""
    # A forked stage runs the code that its server imported, which may be older than the files.
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        if name.partition(".")[0] == OUR_PACKAGE and path.is_relative_to(ROOT):
            package = Path(*name.split("."))
            file = package / path.name if path.name == "__init__.py" else package.with_suffix(".py")
            _imported_by_server[file] = file_checksum(path), _hash_without_and_with_texts(file)


def _hash_without_and_with_texts(file: Path) -> tuple[str, str]:
    return hash_source_file(file), hash_source_file(file, shown=True)


def _edited_source_error(file: Path) -> UserError:
    mixed = "was edited after the stage `code` hashed it, so this stage would mix two versions"
    mend = "undo the edit to resume this stage, or run again to use the new code"
    return UserError(f"{locate_source(file)}: {mixed}; {mend}")
