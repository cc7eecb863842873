"""What a stage has read, compared at its end: DVC hashes settings and files after the command."""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.outside_packages import allow_packages
from moecore.core.plain_values import to_jsonable
from moecore.run.history_file import flatten_keys
from moecore.study.reading.document import Document, load_yaml_document
from moecore.study.reading.stage_params import params_keys_by_field, read_params

GO_ON = "undo the edit to resume this stage, or run again to use the new values"


def params_path() -> str:
    """Return the path of the settings that this process reads."""
    return os.environ.get("MOECORE_PARAMS") or "params.yaml"


def allow_params_packages() -> None:
    """Let this process import parts of the packages that its params.yaml lists, if there is one."""
    if Path(params_path()).is_file():
        document = load_yaml_document(params_path())
        allow_packages(document.packages, document.folders)


def refuse_changed_params(params: Config, **item: object) -> None:
    """Raise UserError, naming the key, where params.yaml holds other settings than ``params``.

    Where the file is gone, DVC itself files nothing. item: fills the keys' templates.
    """
    if not Path(params_path()).is_file():
        return
    now = read_params(type(params), None, **item)
    for field, template in params_keys_by_field(type(params)).items():
        key = template.format(**item)
        before = flatten_keys(to_jsonable(getattr(params, field)), key)
        _refuse_changed_values(before, flatten_keys(to_jsonable(getattr(now, field)), key))


def refuse_changed_document(before: Document) -> None:
    """Raise UserError, naming the key, where the file of ``before`` holds other values now."""
    _refuse_changed_values(
        flatten_keys(before.data), flatten_keys(load_yaml_document(before.path).data)
    )


def _refuse_changed_values(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key in {**before, **now}:
        if key in before and key in now and before[key] == now[key]:
            continue
        was, is_now = (repr(side[key]) if key in side else "not there" for side in (before, now))
        keys = [int(word) if word.isdigit() else word for word in key.split(".")]
        changed = f"was {was} when this stage read it, and is {is_now}"
        raise UserError(
            f"{load_yaml_document(params_path()).place(keys)}: {key}: {changed}; {GO_ON}"
        )


def list_input_files(inputs: Iterable[str | Path]) -> list[Path]:
    """Return the files that identify artifacts: all; of prepared data the card."""
    return sorted(file for path in inputs for file in _identifying_files(Path(path)))


def _identifying_files(path: Path) -> Sequence[Path]:
    if not path.exists():
        raise UserError(f"{path}: does not exist; run `dvc repro`, which makes it first")
    if path.is_file():
        return [path]
    if (path / "card.json").is_file():
        return [path / "card.json"]
    return [file for file in path.rglob("*") if file.is_file()]


def hash_inputs(inputs: Iterable[str | Path]) -> dict[str, str]:
    """Return path → sha256 of the files that identify these artifacts."""
    files = list_input_files(inputs)
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def refuse_changed_inputs(before: Mapping[str, str], inputs: Iterable[str | Path]) -> None:
    """Raise UserError, naming the file, where artifacts are others than those hashed before."""
    now = hash_inputs(inputs)
    for file in {**before, **now}:
        if before.get(file) != now.get(file):
            raise UserError(f"{file}: was changed since this stage read it; {GO_ON}")
