"""Stage ``code``: hashes of the source files that decide results.

``python -m stages.code`` writes artifacts/code/, which the other stages depend on in the place of
the source, so they rerun exactly when a file or a part that they use is edited. It must stay fast:
no torch, no pydantic.
"""

import os
import sys

from moecore.core.files import UserError
from moecore.pipeline.code_hashes import write_code


def code() -> None:
    write_code(os.environ.get("MOECORE_PARAMS", "params.yaml"))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit("usage: python -m stages.code")
    try:
        code()
    except UserError as error:
        sys.exit(str(error))
