"""Files appear whole or not at all."""

import errno
import glob
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class UserError(Exception):
    """A problem that the user can mend; its text is the whole message.

    Stages print it and exit with 1.
    """


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Write to the yielded temporary path; on success it replaces ``path`` atomically, on failure
    nothing remains.

    Raises UserError where the disk is full, naming the file; what was at ``path`` before is
    untouched.
    """
    path = Path(path)
    temporary = _beside(path)
    try:
        yield temporary
        with open(temporary, "rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise _explained(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """Like ``whole_file`` for a folder: it replaces an older folder only when everything in it is
    written.
    """
    path = Path(path)
    temporary = _beside(path)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        yield temporary
        shutil.rmtree(path, ignore_errors=True)
        os.replace(temporary, path)
    except OSError as error:
        raise _explained(error, path) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _beside(path: Path) -> Path:
    """Where ``path`` is written first; what killed processes of this machine left there is removed.

    ``.NAME.MACHINE.PID.part``: of a process of another machine nobody knows whether it lives.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    begins = f".{path.name}.{platform.node()}."
    for left in path.parent.glob(f"{glob.escape(begins)}*.part"):
        pid = left.name.removeprefix(begins).removesuffix(".part")
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    return path.with_name(f"{begins}{os.getpid()}.part")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON with a final newline, atomically; NaN is refused (it is not
    JSON).
    """
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


SEAL = "content_sha256"  # the last key of what ``write_sealed`` writes


def write_sealed(path: str | Path, value: Mapping[str, Any]) -> None:
    """``write_json`` of an object with a checksum of its content, which ``read_json`` verifies."""
    write_json(path, {**value, SEAL: _seal(value)})


def _seal(value: Any) -> str:
    text = json.dumps(json.loads(json.dumps(value)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(path: str | Path) -> Any:
    """Read JSON, without its checksum; a missing or damaged file is a UserError that names it."""
    again = "delete it and run `dvc repro` again"
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the stage that writes it has not run") from None
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise UserError(f"{path}: cannot be read, {why}") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); {again}") from error
    seal = found.pop(SEAL, None) if isinstance(found, dict) else None
    if seal is not None and seal != _seal(found):
        raise UserError(f"{path}: damaged, its content is not what was written; {again}")
    return found


def repository() -> Path | None:
    """The outermost DVC project around the stage that runs, or None outside of DVC.

    A study is a DVC project within that of the repository.
    """
    inner = os.environ.get("DVC_ROOT")
    if not inner:
        return None
    home = Path(inner).resolve()
    above = [folder for folder in home.parents if (folder / ".dvc").is_dir()]
    if above:
        return above[-1]
    return home


def places(root: str | tuple[str, ...]) -> list[Path]:
    """The folders to look in for raw data, in order.

    A relative one counts from the working folder, then from the repository that DVC runs in.
    """
    roots = (root,) if isinstance(root, str) else root
    home = repository()
    found: list[Path] = []
    for path in (Path(r).expanduser() for r in roots):
        candidates = [path]
        if home and not path.is_absolute():
            candidates.append(home / path)
        for candidate in candidates:
            if candidate not in found:
                found.append(candidate)
    return found


def found_file(name: str) -> Path:
    """The file that ``name`` means, from the places that folders of raw data may be in; as it is
    where there is none.
    """
    return next((path for path in places(name) if path.is_file()), Path(name))


def _explained(error: OSError, path: Path) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        why = (error.strerror or str(error)).lower()
        return UserError(
            f"{path}: could not be written, {why}; what was there before is untouched. Free some "
            "space and start again"
        )
    return error


def checksum(path: str | Path, algorithm: str = "sha256") -> str:
    """Hex digest of a file's content, read in blocks; ``algorithm`` is a name of hashlib (sha256,
    md5).
    """
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, algorithm).hexdigest()
