"""The folders that settings name: where raw data are looked for."""

import os
from pathlib import Path

from moecore.core.files import UserError


def outermost_dvc_project() -> Path | None:
    """The outermost DVC project around the stage that runs, or None outside of DVC.

    A study is a DVC project within that of the repository.
    """
    inner = os.environ.get("DVC_ROOT")
    if not inner:
        return None
    home = Path(inner).resolve()
    above = [folder for folder in home.parents if (folder / ".dvc").is_dir()]
    return above[-1] if above else home


def candidate_folders(root: str | tuple[str, ...]) -> list[Path]:
    """The folders to look in for raw data, in order.

    A relative one counts from the working folder, then from the repository that DVC runs in.
    """
    roots = (root,) if isinstance(root, str) else root
    home = outermost_dvc_project()
    given = [Path(os.path.expanduser(one)) for one in roots]
    candidates = [place for path in given for place in ((path, home / path) if home else (path,))]
    return list(dict.fromkeys(candidates))  # an absolute one stays as it is in any folder


def find_raw_file(name: str) -> Path:
    """The file that ``name`` means in the places of raw data; as it is where there is none."""
    return next((path for path in candidate_folders(name) if path.is_file()), Path(name))


def find_teacher_checkpoint(name: str) -> Path:
    """Return the file of a teacher's weights; raises UserError where there is none."""
    path = find_raw_file(name)
    if path.suffix != ".safetensors" or not path.is_file():
        allowed = "an existing .safetensors file (pickled checkpoints are not loaded)"
        raise UserError(f"teacher.checkpoint: found {name!r}; allowed: {allowed}")
    return path
