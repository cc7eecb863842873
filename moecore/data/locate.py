"""Where raw data may lie."""

import os
from pathlib import Path


def places(root: str | tuple[str, ...]) -> list[Path]:
    """The folders to look in, in order: a relative one counts from the working folder, then from the repository (``$DVC_ROOT``)."""
    roots = (root,) if isinstance(root, str) else root
    home = os.environ.get("DVC_ROOT")
    found: list[Path] = []
    for path in (Path(r).expanduser() for r in roots):
        for candidate in [path] if path.is_absolute() or not home else [path, Path(home) / path]:
            if candidate not in found:
                found.append(candidate)
    return found
