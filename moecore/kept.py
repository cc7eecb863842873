"""What a measuring stage has so far: finished parts as JSON lines in its work folder, so that a kill costs one part and not the stage."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moecore.config import Config
from moecore.files import StageError
from moecore.history import Run, record
from moecore.resume import work_folder


class Kept:
    """Parts by key in ``folder``/kept.jsonl, which lives as long as the work folder (see resume.py).

    A line that a kill cut off is dropped. Raises StageError, naming file and line, where a whole line is not a part.
    """

    def __init__(self, folder: Path) -> None:
        self.path = Path(folder) / "kept.jsonl"
        self.parts: dict[str, Any] = {}
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
            self.path.write_bytes(b"".join(lines))
        for number, line in enumerate(lines, 1):
            self._add(line, number)

    def part(self, key: str, make: Callable[[], Any]) -> Any:
        """The part kept under ``key``, or what ``make`` returns, which is on the disk before it is returned.

        Either way it has been JSON, so a resumed stage ends with the same bits as an undisturbed one.
        """
        if key not in self.parts:
            line = json.dumps({"key": key, "part": make()}) + "\n"
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            self.parts[key] = json.loads(line)["part"]
        return self.parts[key]

    def _add(self, line: bytes, number: int) -> None:
        try:
            found = json.loads(line)
            self.parts[found["key"]] = found["part"]
        except (ValueError, KeyError, TypeError):
            raise StageError(f"{self.path}:{number}: not a kept part; remove the file, and the stage starts again") from None


@contextmanager
def resumable(stage: str, params: Config, script: str | Path, phase: str, method: str, seed: int) -> Iterator[tuple[Run, Kept]]:
    """``record`` for a measuring stage, with the parts of a killed one on the same model, data, settings and code."""
    item = f"{stage}/{phase}/{method}/{seed}"
    inputs = [Path("artifacts/data") / phase, Path("artifacts") / phase / method / str(seed)]
    with work_folder(item, params, inputs, script) as work, record(stage, params, phase=phase, method=method, seed=seed) as run:
        yield run, Kept(work)
