"""Keep the ``deps:`` of every dvc.yaml true: ``python tools/dvc_deps.py`` (or ``make deps``).

DVC does not follow imports, so a stage depends on ``artifacts/code/stages/<script>.json``, which ``code_of_stage`` writes: the hashes of
the files that importing its script reaches. This tool writes that line into every stage, and the scripts into ``foreach:`` of
``code_of_stage``; every other line stays as it is. A study under pipelines/ that runs the main pipeline with other params
(its dvc.yaml begins with COPY) gets the main dvc.yaml again, with paths that lead back to the root.
"""

import re
from pathlib import Path

from moecore.sources import ROOT

COPY = "# The main pipeline with this folder's params.yaml; written by `make deps`, not by hand.\n"
COMMAND, DEPS = re.compile(r"^\s+cmd: python -m stages\.(\w+)"), re.compile(r"^(\s+)deps:$")
HASHES, FOREACH = re.compile(r"^\s+- artifacts/code/stages/\w+\.json$"), re.compile(r"(?<=  code_of_stage:\n    foreach: )\[.*\]")
CODE = re.compile(r"^(\s+- )((?:moecore|stages)(?:/code\.py)?)$", re.MULTILINE)  # what the stages that hash code depend on


def rewritten(text: str) -> str:
    """The dvc.yaml in which every stage depends on the hashes of its script."""
    scripts, lines = [], []
    for line in text.splitlines():
        if HASHES.match(line):
            continue
        lines.append(line)
        if found := COMMAND.match(line):
            scripts.append(found[1])
        if (found := DEPS.match(line)) and scripts[-1] != "code":
            lines.append(f"{found[1]}  - artifacts/code/stages/{scripts[-1]}.json")
    named = ", ".join(dict.fromkeys(script for script in scripts if script != "code"))
    return FOREACH.sub(f"[{named}]", "\n".join(lines) + "\n")


def current(path: Path) -> str:
    """What a dvc.yaml should say."""
    text, prefix = path.read_text(encoding="utf-8"), "../" * (len(path.relative_to(ROOT).parts) - 1)
    if not text.startswith(COPY):
        return rewritten(text)
    main = rewritten((ROOT / "dvc.yaml").read_text(encoding="utf-8"))
    return COPY + CODE.sub(rf"\1{prefix}\2", main[main.index("stages:\n") :])


def pipelines() -> list[Path]:
    return [ROOT / "dvc.yaml", *sorted((ROOT / "pipelines").glob("*/dvc.yaml"))]


if __name__ == "__main__":
    for path in pipelines():
        path.write_text(current(path), encoding="utf-8")
