"""Write files atomically, store results that survive a kill, find raw data; user errors."""

import csv
import ctypes
import errno
import glob
import hashlib
import json
import math
import os
import platform
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any, Self

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SYMLINK_LOOP_MESSAGE = "Symlink loop"  # of the RuntimeError before Python 3.13
# Caused by full disks, missing rights, and files where a folder is expected
USER_FIXABLE_ERRNOS = {
    *NO_ROOM,
    *(errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ELOOP, errno.ENOTDIR, errno.EEXIST, errno.EISDIR),
}
SHA256_KEY = "content_sha256"  # the last key that ``write_json_sha256`` writes
PR_SET_PDEATHSIG = 1


def format_found_and_allowed(*, found: object, allowed: object) -> str:
    return f"found {found}; allowed: {allowed}"


class UserError(Exception):
    """An error that the user can fix; stages print its message, one line, and exit with 1."""

    @classmethod
    def at(cls, place: object, *, found: object, allowed: object) -> Self:
        """Return the error ``place: found …; allowed: …``; ``place`` is a key or a file."""
        return cls(f"{place}: {format_found_and_allowed(found=found, allowed=allowed)}")


class FileAccessError(UserError):
    """Error for a file that the operating system does not let this process read or write."""


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path; the file written there replaces ``path`` if the block succeeds."""
    with _replace_when_done(Path(path)) as temporary:
        yield temporary
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder, which replaces the folder ``path`` if the block succeeds."""
    with _replace_when_done(Path(path)) as temporary:
        _remove_path(temporary)
        temporary.mkdir()
        yield temporary
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _replace_when_done(path: Path) -> Iterator[Path]:
    temporary = None
    try:
        with explain_file_errors(path):
            temporary = _prepare_temporary_path(path)
            yield temporary
            os.replace(temporary, path)
    except FileAccessError as error:  # name the final path instead of the temporary one
        text = str(error).replace(str(temporary or path), str(path))
        raise FileAccessError(text) from error.__cause__
    finally:
        if temporary is not None:
            with suppress(OSError):  # the reason is raised above; the next process removes the rest
                _remove_path(temporary)


@contextmanager
def explain_file_errors(path: Path | None = None) -> Iterator[None]:
    """Turn an OSError of the block into FileAccessError, if a user can fix it (disk full, …)."""
    # path: the file that the block reads or writes, for errors that name no file.
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        number = file_errno(error)
        if isinstance(error, shutil.Error):
            place = error.args[0][0][1]  # where a copy failed
        elif str(error).startswith(SYMLINK_LOOP_MESSAGE):
            place = str(error).partition("'")[2].removesuffix("'")
        else:
            place = getattr(error, "filename2", None) or getattr(error, "filename", None)
        place = place or path or (Path.cwd() if number in NO_ROOM else None)
        if number not in USER_FIXABLE_ERRNOS or place is None:
            raise
        raise FileAccessError(f"{place}: {os.strerror(number).lower()}") from error


def file_errno(error: BaseException) -> int | None:
    if (number := getattr(error, "errno", None)) is not None:
        return number
    text = str(error)  # other libraries wrap system errors in classes without a number
    if match := re.search(r"(?:Errno|os error) (\d+)", text):
        return int(match[1])
    if text.startswith(SYMLINK_LOOP_MESSAGE):
        return errno.ELOOP
    return errno.ENOSPC if "disk is full" in text else None


def _prepare_temporary_path(path: Path) -> Path:
    """Return ``.NAME.MACHINE.PID.part`` next to ``path``; remove such files of killed processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begins = f".{path.name}.{platform.node()}."
    for leftover in path.parent.glob(f"{glob.escape(begins)}*.part"):
        from psutil import pid_exists  # layers and models alone do not need it

        pid = leftover.name.removeprefix(begins).removesuffix(".part")
        if pid.isdigit() and not pid_exists(int(pid)):
            _remove_path(leftover)
    return path.with_name(f"{begins}{os.getpid()}.part")


def _remove_path(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def to_jsonable(value: Any) -> Any:
    """Convert settings, arrays, tensors and paths to JSON types; non-finite numbers become None."""
    if hasattr(value, "model_dump"):  # pydantic is not imported here: it takes time
        return to_jsonable(value.model_dump(mode="json"))
    if hasattr(value, "_asdict"):
        return to_jsonable(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(inner) for key, inner in value.items()}
    if hasattr(value, "tolist"):
        return to_jsonable(value.tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_jsonable(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (str, int, bool)):
        return value
    return str(value)


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON, atomically; ValueError for NaN, which JSON lacks."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def write_csv(path: str | Path, rows: Iterable[Iterable[Any]]) -> None:
    text = StringIO(newline="")  # keeps line ends
    csv.writer(text, lineterminator="\n").writerows(rows)
    write_atomic(path, text.getvalue())


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Write bytes, or a text as UTF-8, to a file atomically."""
    if isinstance(content, str):
        content = content.encode()
    with atomic_file(path) as temporary:
        temporary.write_bytes(content)


def write_json_sha256(path: str | Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object with a checksum of its content, which ``read_json`` verifies."""
    write_json(path, add_checksum(value))


def add_checksum(value: Mapping[str, Any]) -> dict[str, Any]:
    return {**value, SHA256_KEY: _content_checksum(value)}


def pop_and_compare_checksum(value: Any) -> bool:
    """Remove the checksum from ``value``, in place; return whether it existed and was correct."""
    seal = value.pop(SHA256_KEY, None) if isinstance(value, dict) else None
    return seal is not None and seal == _content_checksum(value)


def _content_checksum(value: Any) -> str:
    text = json.dumps(json.loads(json.dumps(value)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(path: str | Path, sealed: bool = False) -> Any:
    """Return a JSON file's value; UserError for a wrong or, with ``sealed``, missing checksum."""
    again = "delete it and run `dvc repro` again"
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
        has_seal = isinstance(value, dict) and SHA256_KEY in value
        is_intact = has_seal and pop_and_compare_checksum(value)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the stage that writes it has not run") from None
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UserError(f"{path}: cannot be read, {why}; {again}") from None
    except (ValueError, RecursionError) as error:  # RecursionError: brackets nested too deeply
        raise UserError(f"{path}: not valid JSON ({error}); {again}") from error
    if sealed and not has_seal:
        raise UserError(f"{path}: damaged, its checksum ({SHA256_KEY}) is missing; {again}")
    if has_seal and not is_intact:
        raise UserError(f"{path}: damaged, its content is not what was written; {again}")
    return value


def append_line(path: Path, line: str, sync: bool = False) -> None:
    """Append a line to a file; with ``sync``, wait until it is on the disk."""
    # A kill or a full disk may leave an incomplete last line. Readers stop before it, and a resumed
    # stage removes it first.
    try:
        with explain_file_errors(path), open(path, "ab") as file:
            file.write(line.encode())
            if sync:
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"{path}: could not be written, {reason}") from error


def parse_intact_lines(data: bytes, is_whole: Callable[[Any], bool]) -> Iterator[tuple[bytes, Any]]:
    """Yield (line, its JSON value) until a line is incomplete, or ``is_whole`` refuses a value."""
    for line in data.splitlines(keepends=True):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not line.endswith(b"\n") or not is_whole(value):
            return
        yield line, value


class ResumableParts:
    """A stage's named results, stored in ``folder``/kept.jsonl, so that a killed stage resumes."""

    def __init__(self, folder: Path, inputs: Any = None) -> None:
        """Read results; a StageInputs in ``inputs`` stops the stage if code or settings change."""
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
        lines = list(parse_intact_lines(content, pop_and_compare_checksum))
        self.parts: dict[str, Any] = {part["key"]: part["part"] for _, part in lines}
        intact = b"".join(line for line, _ in lines)
        if intact != content:
            write_atomic(self.path, intact)

    def attach_progress_bar(self, bar: Any) -> None:
        """Show the number of stored results in ``bar``, now and after each new result."""
        self.bar = bar

    def part(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return the result ``name``, decoded from JSON; if it is not stored, compute it first."""
        if name not in self.parts:
            part = compute()
            if self.inputs is not None:
                self.inputs.refuse_edited_code()
            line = json.dumps(add_checksum({"key": name, "part": part})) + "\n"
            append_line(self.path, line, sync=True)
            if self.inputs is not None:
                self.inputs.refuse_edited_settings()
            self.parts[name] = json.loads(line)["part"]
        if self.bar is not None:
            self.bar.update(len(self.parts))
        return self.parts[name]


def file_checksum(path: str | Path, algorithm: str = "sha256") -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, algorithm).hexdigest()


def join_below_root(root: Path, name: str | Path) -> Path:
    """Return ``root / name``; UserError if it lies outside ``root`` after following links."""
    # A Path that begins with ``root`` is not joined again; a str always is.
    if isinstance(name, Path) and name.is_relative_to(root):
        name = str(name.relative_to(root))
    path = root / name
    shown = str(name)
    try:
        is_outside = ".." in Path(shown).parts or not path.resolve().is_relative_to(root.resolve())
        if not is_outside:
            path.exists()  # raises for a name that is too long
    except (OSError, ValueError, RuntimeError) as error:  # forbidden characters; loops of links
        why = (getattr(error, "strerror", "") or str(error)).lower()
        short = repr(shown[:60]) + ("…" if len(shown) > 60 else "")
        raise UserError(f"{root}: found {short}, which no file can be called: {why}") from None
    if is_outside:
        outside = f"{shown!r}, which leads out of this folder"
        raise UserError.at(root, found=outside, allowed="files below it, and links to such")
    return path


def outermost_dvc_project() -> Path | None:
    """Return the outermost DVC project around the running stage; None if DVC did not start it."""
    inner = os.environ.get("DVC_ROOT")
    if not inner:
        return None
    home = Path(inner).resolve()  # a study is a DVC project inside the repository's
    above = [folder for folder in home.parents if (folder / ".dvc").is_dir()]
    return above[-1] if above else home


def candidate_raw_folders(root: str | tuple[str, ...]) -> list[Path]:
    """Return the possible folders of raw data: each ``root`` here and in the outermost project."""
    roots = (root,) if isinstance(root, str) else root
    home = outermost_dvc_project()
    candidates: dict[Path, None] = {}  # an absolute path is the same in both folders
    for path in [Path(os.path.expanduser(name)) for name in roots]:
        candidates |= dict.fromkeys((path, home / path) if home else (path,))
    return list(candidates)


def find_raw_folder(root: str | tuple[str, ...], what: str) -> Path:
    """Return the first existing folder of raw data; if none, UserError describes it by ``what``."""
    folders = candidate_raw_folders(root)
    if folder := next((path for path in folders if path.is_dir()), None):
        return folder
    listed = " and ".join(map(str, folders))
    raise UserError(f"{listed}: no such folder; set `root` to {what}")


def find_raw_file(name: str) -> Path:
    return next((path for path in candidate_raw_folders(name) if path.is_file()), Path(name))


def find_teacher_checkpoint(name: str) -> Path:
    path = find_raw_file(name)
    if path.suffix != ".safetensors" or not path.is_file():
        allowed = "an existing .safetensors file (pickled checkpoints are not loaded)"
        raise UserError.at("teacher.checkpoint", found=repr(name), allowed=allowed)
    return path


def available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_parent_death_signal() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
