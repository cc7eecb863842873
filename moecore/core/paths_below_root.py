"""Names from outside that become paths: none leaves its folder."""

from pathlib import Path

from moecore.core.files import UserError


def join_below_root(root: Path, name: str | Path) -> Path:
    """``root / name``, which lies below ``root`` once all links are followed; it is not opened.

    A path that begins with ``root`` is taken as it is, a text never. Raises UserError for a name
    that leads out of ``root``, or that no file can have.
    """
    if isinstance(name, Path) and name.is_relative_to(root):
        name = str(name.relative_to(root))
    path, shown = root / name, str(name)
    try:
        leaves = ".." in Path(shown).parts or not path.resolve().is_relative_to(root.resolve())
        if not leaves:
            path.exists()  # the system says which names are too long
    except (OSError, ValueError, RuntimeError) as error:  # letters that names lack; loops of links
        why = (getattr(error, "strerror", "") or str(error)).lower()
        short = f"{shown[:60]!r}" + "…" * (len(shown) > 60)
        raise UserError(f"{root}: found {short}, which no file can be called: {why}") from None
    if leaves:
        problem = f"found {shown!r}, which leads out of this folder"
        raise UserError(f"{root}: {problem}; allowed: files below it, and links to such")
    return path
