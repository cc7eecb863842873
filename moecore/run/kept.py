"""What a measuring stage has so far: finished parts as JSON lines in its work folder.

So a kill costs one part and not the stage.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.run.history import Run, record
from moecore.run.resume import work_folder


class Kept:
    """Parts by key in ``folder``/kept.jsonl, which lives as long as the work folder (resume.py).

    A line that a kill cut off is dropped. Raises UserError, naming file and line, where a whole
    line is not a part.
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

    def part(self, name: str, compute: Callable[[], Any]) -> Any:
        """The part kept under ``name``, or what ``compute`` returns, which is on the disk first.

        Either way it has been JSON, so a resumed stage ends with the same bits as any other.
        """
        if name not in self.parts:
            line = json.dumps({"key": name, "part": compute()}) + "\n"
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            self.parts[name] = json.loads(line)["part"]
        return self.parts[name]

    def _add(self, line: bytes, number: int) -> None:
        try:
            found = json.loads(line)
            self.parts[found["key"]] = found["part"]
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f"{self.path}:{number}: not a kept part; "
                "remove the file, and the stage starts again"
            ) from None


@contextmanager
def resumable(
    stage: str, params: Config, script: str | Path, phase: str, method: str, seed: int
) -> Iterator[tuple[Run, Kept]]:
    """``record`` for a measuring stage, with the parts of a killed one.

    They are taken up where model, data, settings and code are the same.
    """
    item = f"{stage}/{phase}/{method}/{seed}"
    inputs = [Path("artifacts/data") / phase, Path("artifacts") / phase / method / str(seed)]
    with (
        work_folder(item, params, inputs, script) as work,
        record(stage, params, phase=phase, method=method, seed=seed) as run,
    ):
        yield run, Kept(work)
