"""Floor 0: the files of code under artifacts/code/, which stages depend on in the place of the source files themselves."""

import os
from pathlib import Path

from moecore.files import StageError
from moecore.sources import closure, fingerprint, part_files
from moecore.yaml12 import load

FOLDER = "artifacts/code"


def code_hashes(group: str, name: str) -> tuple[Path, dict[str, str]]:
    """The file that holds the hashes, relative to the working directory, and what it should hold: path of a source file → sha256.

    group: ``stage`` (what importing the script ``stages/<name>.py`` reaches), ``methods`` (the parts under ``methods.<name>`` of
    params.yaml) or ``section`` (the parts under the dotted key ``name``). Raises StageError for another group, a missing key or file.
    """
    if group == "stage":
        return Path(FOLDER, "stages", f"{name}.json"), fingerprint(closure(Path("stages", f"{name}.py")))
    if group not in ("methods", "section"):
        raise StageError(f"code: found {group!r}; allowed: stage, methods, section")
    keys = (group, name) if group == "methods" else tuple(name.split("."))
    section = load(os.environ.get("MOECORE_PARAMS", "params.yaml")).get(keys)
    return Path(FOLDER, *keys).with_suffix(".json"), fingerprint(part_files(section, under=keys[-1]))
