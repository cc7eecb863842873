"""What a stage has read, compared again at its checkpoints and at its end.

DVC hashes settings and files after the command has ended, so a result could be filed under
settings, code or artifacts that it was not made with.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.core.outside_packages import allow_packages
from moecore.core.plain_values import to_jsonable
from moecore.core.source_layout import CODE
from moecore.run.history_file import flatten_keys
from moecore.run.inputs import StageCode
from moecore.study.document import Document, load_yaml_document
from moecore.study.settings import params_keys_by_field, read_params

GO_ON = "undo the edit to resume this stage, or run again to use the new values"


def params_path() -> str:
    """Return the path of the settings that this process reads."""
    return os.environ.get("MOECORE_PARAMS") or "params.yaml"


def allow_params_packages() -> None:
    """Let this process import parts of the packages that its params.yaml lists, if there is one."""
    if Path(params_path()).is_file():
        document = load_yaml_document(params_path())
        allow_packages(document.packages, document.folders)


class StageInputs:
    """The settings, the code and the artifacts that a stage reads."""

    def __init__(
        self,
        params: Config | None,
        artifacts: Iterable[str | Path],
        hash_files: Sequence[Path] = (),
        **item: object,
    ) -> None:
        """Take the hashes of all. Raises UserError where the code is not what was hashed.

        hash_files: of ``stage_hash_files``. item: fills the templates of the settings' keys.
        """
        self._code = StageCode(hash_files)
        self._code.refuse_edits()
        self._artifacts = [*artifacts, *hash_files]
        self._hashes = hash_inputs(self._artifacts)
        self._params = params
        self._item = item
        self._text: bytes | None = None  # of params.yaml, when its values were last equal

    def key(self) -> str:
        """Return a hash of all: what was begun with other inputs is not continued."""
        assert self._params is not None, "a stage that is resumed has settings"
        text = json.dumps([self._params.model_dump(mode="json"), self._hashes], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def refuse_edited_code(self) -> None:
        """Raise UserError, naming the file, where it is not the code that was hashed."""
        self._code.refuse_edits()

    def refuse_edited_settings(self) -> None:
        """Raise UserError, naming the key, where params.yaml now has other values.

        Where params.yaml is gone, nothing is raised: DVC then files no result.
        """
        path = Path(params_path())
        if self._params is None or not path.is_file():
            return
        if (text := path.read_bytes()) == self._text:
            return
        now = read_params(type(self._params), None, **self._item)
        for field, template in params_keys_by_field(type(self._params)).items():
            key = template.format(**self._item)
            before = flatten_keys(to_jsonable(getattr(self._params, field)), key)
            _refuse_changed_values(before, flatten_keys(to_jsonable(getattr(now, field)), key))
        self._text = text

    def refuse_all_edits(self) -> None:
        """Raise UserError, naming what changed: code, artifacts or settings."""
        self.refuse_edited_code()
        refuse_changed_inputs(self._hashes, self._artifacts)
        self.refuse_edited_settings()


def read_stage_inputs(
    stage: str,
    params: Config,
    script: str | Path,
    artifacts: Sequence[str | Path],
    phase: str | None = None,
    method: str | None = None,
) -> StageInputs:
    """Return what the stage of this script and item reads. Raises UserError for edited code."""
    files = stage_hash_files(script, type(params), stage, phase, method)
    return StageInputs(params, artifacts, files, method=method, data=phase)


def stage_hash_files(
    script: str | Path,
    params: type[Config],
    stage: str,
    phase: str | None = None,
    method: str | None = None,
) -> list[Path]:
    """Return the files of artifacts/code/ with the hashes of a stage's code, as in dvc.yaml.

    They are those of the script, of the measurement ``stage``, of the method, or of all methods
    where the stage reads ``run.methods``, and of the sections that ``params`` reads. Raises
    UserError where the stage ``code`` has not written that of the script.
    """
    own = CODE / "stages" / f"{Path(script).stem}.json"
    if not own.is_file():
        raise UserError(
            f"{own}: no such file; run `python -m moecore.stages.code`, which writes it"
        )
    keys = params_keys_by_field(params).values()
    sections = {key.format(method=method, data=phase) for key in keys}
    methods = sorted((CODE / "methods").glob("*.json")) if "run.methods" in sections else []
    sections |= {section.partition(".")[0] for section in sections}
    named = [
        CODE / "measure" / f"{stage}.json",
        CODE / "methods" / f"{method}.json",
        *(CODE / "sections" / f"{section}.json" for section in sorted(sections)),
    ]
    return [own, *methods, *(file for file in named if file.is_file())]


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
