"""Parts of a result that survive a kill, appended as lines of JSON to a file."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moecore.core.files import (
    UserError,
    explain_file_errors,
    sealed_object,
    verify_and_remove_seal,
    write_whole,
)


def append_line(path: Path, line: str, sync: bool = False) -> None:
    """Append a line to a file; sync: it is on the disk before this returns.

    A kill or a full disk may leave an incomplete last line. Readers stop before it, and a resumed
    stage removes it first. Raises UserError if the file cannot be written.
    """
    try:
        with explain_file_errors(path), open(path, "ab") as file:
            file.write(line.encode())
            if sync:
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"{path}: could not be written, {reason}") from error


def whole_lines(content: bytes, is_whole: Callable[[Any], bool]) -> Iterator[tuple[bytes, Any]]:
    """Yield lines of JSON with their values, up to the first incomplete or invalid line."""
    for line in content.splitlines(keepends=True):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not line.endswith(b"\n") or not is_whole(value):
            return
        yield line, value


class KeptParts:
    """Parts by key in ``folder``/kept.jsonl; those after the first damaged line are recomputed."""

    def __init__(self, folder: Path, inputs: Any = None) -> None:
        """Read the stored parts; ``inputs`` of the stage are compared before a part is stored."""
        self.folder = Path(folder)
        self.inputs = inputs
        self.path = self.folder / "kept.jsonl"
        self.bar: Any = None
        try:
            content = self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            mend = "remove it, and the stage starts again"
            raise UserError(f"{self.path}: cannot be read, {why}; {mend}") from error
        lines = list(whole_lines(content, verify_and_remove_seal))
        self.parts: dict[str, Any] = {part["key"]: part["part"] for _, part in lines}
        intact = b"".join(line for line, _ in lines)
        if intact != content:
            write_whole(self.path, intact)

    def show_progress(self, bar: Any) -> None:
        """Update ``bar`` after every part from now on."""
        self.bar = bar

    def part(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the part stored under ``name``, or compute and store it.

        The part is always read back from JSON, so a resumed stage ends with the same bits.
        """
        if name not in self.parts:
            part = compute()
            if self.inputs is not None:
                self.inputs.refuse_edited_code()
            line = json.dumps(sealed_object({"key": name, "part": part})) + "\n"
            append_line(self.path, line, sync=True)
            if self.inputs is not None:
                self.inputs.refuse_edited_settings()
            self.parts[name] = json.loads(line)["part"]
        if self.bar is not None:
            self.bar.update(len(self.parts))
        return self.parts[name]
