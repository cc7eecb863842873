"""Stage ``code``: the hashes of the source files of a stage, or of the parts that a section of params.yaml names.

``python -m stages.code stage pretrain`` writes artifacts/code/stages/pretrain.json, ``python -m stages.code methods vmoe``
artifacts/code/methods/vmoe.json, ``python -m stages.code section robustness.attacks`` artifacts/code/robustness/attacks.json.
Stages depend on such files instead of on the source, so they rerun exactly when a file or a part that they use is edited.
It runs often, so it must stay fast: no torch, no pydantic.
"""

import sys

from moecore.code_hashes import code_hashes
from moecore.files import StageError, write_json

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m stages.code stage SCRIPT | methods NAME | section DOTTED.KEY")
    try:
        write_json(*code_hashes(*sys.argv[1:]))
    except StageError as error:
        sys.exit(str(error))
