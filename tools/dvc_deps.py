"""Keep the ``deps:`` of every dvc.yaml true: ``python tools/dvc_deps.py`` (or ``make deps``).

DVC does not follow imports. The lines ``- moecore/….py`` and ``- stages/….py`` of a stage become the files that importing
its script reaches; every other line stays as it is. A study under pipelines/ that runs the main pipeline with other
params (its dvc.yaml begins with COPY) gets the main dvc.yaml again, with paths that lead back to the root.
"""

import re
from pathlib import Path

from moecore.sources import ROOT, closure

COPY = "# The main pipeline with this folder's params.yaml; written by `make deps`, not by hand.\n"
STAGE, COMMAND = re.compile(r"^  (\w+):$"), re.compile(r"^\s+cmd: python -m stages\.(\w+)")
CODE, DEPS = re.compile(r"^\s+- (?:\.\./)*(?:moecore|stages)/\S+\.py$"), re.compile(r"^(\s+)deps:$")


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


def copied(main: str, prefix: str) -> str:
    """The main dvc.yaml for a study in a folder of its own."""
    stages = main[main.index("stages:\n") :].replace("- moecore\n", f"- {prefix}moecore\n")
    return COPY + rewritten(stages, prefix)


def current(path: Path) -> str:
    """What a dvc.yaml should say."""
    text, prefix = path.read_text(encoding="utf-8"), "../" * (len(path.relative_to(ROOT).parts) - 1)
    return copied((ROOT / "dvc.yaml").read_text(encoding="utf-8"), prefix) if text.startswith(COPY) else rewritten(text, prefix)


def pipelines() -> list[Path]:
    return [ROOT / "dvc.yaml", *sorted((ROOT / "pipelines").glob("*/dvc.yaml"))]


if __name__ == "__main__":
    for path in pipelines():
        path.write_text(current(path), encoding="utf-8")
