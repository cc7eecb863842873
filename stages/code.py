"""Stage ``code``: the hashes of the source files of the parts that a section of params.yaml names.

``python -m stages.code methods vmoe`` writes artifacts/code/methods/vmoe.json, ``python -m stages.code section
robustness.attacks`` writes artifacts/code/robustness/attacks.json. Stages depend on such a file instead of on the families,
so they rerun exactly when a part that they use is edited. It runs often, so it must stay fast: no torch, no pydantic.
"""

import os
import sys

from moecore.files import StageError, write_json
from moecore.sources import fingerprint, part_files
from moecore.yaml12 import load


def code(group: str, name: str) -> None:
    """Hash the parts under ``methods.<name>`` (group ``methods``) or under the dotted key ``name`` (group ``section``)."""
    keys = (group, name) if group == "methods" else tuple(name.split("."))
    section = load(os.environ.get("MOECORE_PARAMS", "params.yaml")).get(keys)
    write_json("/".join(("artifacts/code", *keys)) + ".json", fingerprint(part_files(section, under=keys[-1])))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("methods", "section"):
        sys.exit("usage: python -m stages.code methods NAME | section DOTTED.KEY")
    try:
        code(*sys.argv[1:])
    except StageError as error:
        sys.exit(str(error))
