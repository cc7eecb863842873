"""Where raw data may lie."""

from pathlib import Path

from moecore.core.files import repository


def places(root: str | tuple[str, ...]) -> list[Path]:
    """The folders to look in, in order.

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
