"""Files appear whole or not at all."""

import errno
import glob
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

from moecore.core.operating_system import largest_file_size


class UserError(Exception):
    """A problem that the user can mend; its text is the whole message. Stages exit with 1."""


class FullDisk(UserError):
    """A file that there is no room for; what was there before is untouched."""


@contextmanager
def whole_file(path: str | Path, size: int | None = None) -> Iterator[Path]:
    """Write to the yielded temporary path; on success it replaces ``path`` atomically, on failure
    nothing remains.

    size: the bytes that it takes, where they are known. Raises FullDisk where there is no room,
    naming the file and the space; what was at ``path`` before is untouched.
    """
    with _whole(Path(path), size) as temporary:
        yield temporary
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())


@contextmanager
def whole_folder(path: str | Path, size: int | None = None) -> Iterator[Path]:
    """Like ``whole_file`` for a folder, which replaces an older one once all in it is written."""
    with _whole(Path(path), size) as temporary:
        _remove(temporary)
        temporary.mkdir()
        yield temporary
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _whole(path: Path, size: int | None) -> Iterator[Path]:
    with room_for(path, size):
        temporary = _beside(path)
    try:
        with room_for(path, size, temporary):
            yield temporary
            os.replace(temporary, path)
    finally:
        _remove(temporary)


@contextmanager
def room_for(
    path: Path | None = None, size: int | None = None, temporary: Path | None = None
) -> Iterator[None]:
    """Raises FullDisk where what is done inside finds no room for ``path``.

    size: bytes; where it is left out, the file is the one that the error names, if it does.
    temporary: where it is written first, and then removed.
    """
    try:
        yield
    except Exception as error:
        if (number := full(error)) is None:
            raise
        if path is None or size is None:
            path = Path(_named(error) or path or Path.cwd())
        raise FullDisk(_no_room(number, path, size, temporary)) from error


def _named(error: Exception) -> str | None:
    """The file that could not be written, where the error says it; of a copy, the second."""
    if isinstance(error, shutil.Error):
        return error.args[0][0][1]
    return getattr(error, "filename2", None) or getattr(error, "filename", None)


def full(error: BaseException) -> int | None:
    """The error's number where a disk, a quota or a file's largest size leaves no room; None for
    any other error, and for one that was explained before.
    """
    if isinstance(error, UserError):
        return None
    number = getattr(error, "errno", None)
    said = re.search(r"(?:Errno|os error) (\d+)|disk is full", str(error))  # by other libraries
    if number is None and said:
        number = int(said[1] or errno.ENOSPC)
    return number if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else None


def _no_room(number: int, path: Path, size: int | None, temporary: Path | None) -> str:
    """What is needed, and what is free once ``temporary`` is gone."""
    begun = []
    words = os.strerror(number).lower()
    if temporary is not None:
        begun = [one.stat() for one in (temporary, *temporary.rglob("*")) if one.is_file()]
    if size is not None:
        words += f": it takes {size:,} bytes"
    elif begun:
        words += f": {sum(one.st_size for one in begun):,} bytes of it were written"
    if number == errno.EFBIG and (most := largest_file_size()) is not None:
        words += f"; a file may have {most:,} (`ulimit -f`)"
    if number == errno.ENOSPC:
        disk = os.statvfs(next(folder for folder in path.absolute().parents if folder.is_dir()))
        free = disk.f_bavail * disk.f_frsize + sum(512 * one.st_blocks for one in begun)
        words += f"; {free:,} bytes are free"
        if disk.f_files > disk.f_favail == 0:
            words += ", but there may be no more files"
    hidden = rf"^\.(.+)\.{re.escape(platform.node())}\.\d+\.part$"
    shown = Path(*(re.sub(hidden, r"\1", part) for part in path.parts))  # as it is called at last
    untouched = "what was there before is untouched. Free some space and start again"
    return f"{shown}: could not be written, {words}; {untouched}"


def _beside(path: Path) -> Path:
    """Where ``path`` is written first; what killed processes of this machine left there is removed.

    ``.NAME.MACHINE.PID.part``: of a process of another machine nobody knows whether it lives.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    begins = f".{path.name}.{platform.node()}."
    for left in path.parent.glob(f"{glob.escape(begins)}*.part"):
        pid = left.name.removeprefix(begins).removesuffix(".part")
        if pid.isdigit() and not _alive(int(pid)):
            _remove(left)
    return path.with_name(f"{begins}{os.getpid()}.part")


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON and a newline, atomically; NaN, not JSON, is refused."""
    write_whole(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


@contextmanager
def whole_text(path: str | Path) -> Iterator[StringIO]:
    """What is written to the yielded file replaces ``path`` at the end; nothing does on failure.

    It is kept in memory until then, so that a disk without room for it is said with its size.
    """
    text = StringIO(newline="")  # line ends stay as they are written
    yield text
    write_whole(path, text.getvalue())


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write bytes, or a text as UTF-8, atomically."""
    if isinstance(content, str):
        content = content.encode()
    with whole_file(path, len(content)) as temporary:
        temporary.write_bytes(content)


SEAL = "content_sha256"  # the last key of what ``write_sealed`` writes


def write_sealed(path: str | Path, value: Mapping[str, Any]) -> None:
    """``write_json`` of an object with a checksum of its content, which ``read_json`` verifies."""
    write_json(path, sealed_object(value))


def sealed_object(value: Mapping[str, Any]) -> dict[str, Any]:
    """An object of JSON with a checksum of its content as its last key."""
    return {**value, SEAL: _seal(value)}


def is_whole(found: Any) -> bool:
    """Whether this is such an object, and its content that which was sealed; the key is removed."""
    seal = found.pop(SEAL, None) if isinstance(found, dict) else None
    return seal is not None and seal == _seal(found)


def _seal(value: Any) -> str:
    text = json.dumps(json.loads(json.dumps(value)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(path: str | Path, sealed: bool = False) -> Any:
    """Read JSON, without its checksum; a missing or damaged file is a UserError that names it.

    sealed: of ``write_sealed`` alone; what has no checksum is damaged too.
    """
    again = "delete it and run `dvc repro` again"
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the stage that writes it has not run") from None
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UserError(f"{path}: cannot be read, {why}; {again}") from None
    except (ValueError, RecursionError) as error:  # the latter: brackets in brackets without end
        raise UserError(f"{path}: not valid JSON ({error}); {again}") from error
    has_seal = isinstance(found, dict) and SEAL in found
    if sealed and not has_seal:
        raise UserError(f"{path}: damaged, it has no checksum ({SEAL}); {again}")
    if has_seal and not is_whole(found):
        raise UserError(f"{path}: damaged, its content is not what was written; {again}")
    return found


def checksum(path: str | Path, algorithm: str = "sha256") -> str:
    """Hex digest of a file's content, read in blocks; ``algorithm`` is a name of hashlib (sha256,
    md5).
    """
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, algorithm).hexdigest()
