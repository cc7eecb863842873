"""Write the code of each stage into its ``deps:`` in a dvc.yaml: ``python tools/dvc_deps.py dvc.yaml``.

DVC does not follow imports. The lines ``- moecore/….py`` and ``- stages/….py`` of a stage become the files that importing
its script reaches; every other line stays as it is.
"""

import re
import sys
from pathlib import Path

from moecore.sources import closure

STAGE, COMMAND = re.compile(r"^  (\w+):$"), re.compile(r"^\s+cmd: python -m stages\.(\w+)")
CODE, DEPS = re.compile(r"^\s+- (?:moecore|stages)/\S+\.py$"), re.compile(r"^(\s+)deps:$")


def rewritten(text: str, prefix: str = "") -> str:
    """The dvc.yaml with the code lines of every stage replaced; ``prefix`` leads from its folder to the root."""
    lines, script, given = [], "", [line for line in text.splitlines() if not CODE.match(line)]
    for number, line in enumerate(given):
        lines.append(line)
        if found := COMMAND.match(line):
            script = f"stages/{found[1]}.py"
        if found := DEPS.match(line):
            covered = f"{found[1]}  - {prefix}moecore" in given[number : number + 2]
            files = sorted(path.as_posix() for path in closure(script) if not (covered and path.parts[0] == "moecore"))
            lines += [f"{found[1]}  - {prefix}{file}" for file in files]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(rewritten(path.read_text(encoding="utf-8"), "../" * (len(path.parts) - 1)), encoding="utf-8")
