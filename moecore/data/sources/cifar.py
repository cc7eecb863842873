"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) from the *binary* version: 50,000 + 10,000 colour
images, 32×32.
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from moecore.core.files import UserError
from moecore.core.roots import candidate_folders
from moecore.data.files.cifar_files import SETS, fetch_archive, read_binary
from moecore.data.files.published_sets import count_published_set, write_published_set
from moecore.data.preview import Preview
from moecore.data.splits import SplitSettings
from moecore.data.writer import DatasetInfo
from moecore.tasks.classification import Classification

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
# the last three are files
PYTHON = (
    "cifar-{}-python.tar.gz",
    "cifar-10-batches-py",
    "cifar-100-python",
    "data_batch_1",
    "train",
    "meta",
)


class Cifar(SplitSettings):
    """The binary files or the authors' archive; the python version is refused: it is pickle."""

    kind: Literal["cifar"] = "cifar"
    classes: Literal[10, 100] = Field(
        10, description="10: CIFAR-10; 100: CIFAR-100 with its fine labels"
    )
    root: str | tuple[str, ...] = Field(
        "data/raw/cifar", description="Folder, or folders in order, with the .bin files or archive"
    )
    size: int = Field(
        32, ge=4, le=1024, description="Height and width in pixels; other than 32 is resized"
    )
    download: bool = Field(
        False, description="Fetch the archive into the first root where it is on none"
    )

    def prepare(self, folder: Path) -> dict[str, Any]:
        """Write the prepared layout and return its card; UserError on missing or damaged files."""
        chosen = SETS[self.classes]
        place = self._find()
        info = DatasetInfo(
            f"CIFAR-{self.classes}",
            Classification(classes=chosen.names),
            3,
            self.size,
            "none stated by the authors",
            PAGE,
            self,
        )
        train, test = (read_binary(place, chosen, files) for files in (chosen.train, chosen.test))
        return write_published_set(folder, info, self, train, test)

    def preview(self) -> Preview:
        """Return what ``prepare`` would write; no file is read."""
        task = Classification(classes=SETS[self.classes].names)
        known = Preview(
            f"CIFAR-{self.classes}", 3, self.size, task, seen=tuple(candidate_folders(self.root))
        )
        return known.complete_with(self._look)

    def _look(self) -> dict[str, Any]:
        chosen = SETS[self.classes]
        roots = candidate_folders(self.root)
        place = self._find_present(roots)
        if place is None and not self.download:
            raise UserError(self._absent(roots))
        note = None if place else f"prepare will download it into {roots[0]}"
        numbers = (sum(files.values()) for files in (chosen.train, chosen.test))
        counts = count_published_set(f"CIFAR-{self.classes}", chosen.names, self, *numbers)
        return {"counts": counts, "note": note}

    def _find(self) -> Path:
        """The folder with all .bin files, or the archive."""
        roots = candidate_folders(self.root)
        if place := self._find_present(roots):
            return place
        if self.download:
            return fetch_archive(SETS[self.classes], roots[0])
        raise UserError(self._absent(roots))

    def _find_present(self, roots: list[Path]) -> Path | None:
        chosen = SETS[self.classes]
        for root in roots:
            for folder in (root, root / chosen.folder):
                if all((folder / name).is_file() for name in chosen.train | chosen.test):
                    return folder
            if (root / chosen.archive).is_file():
                return root / chosen.archive
        return None

    def _absent(self, roots: list[Path]) -> str:
        chosen = SETS[self.classes]
        wanted = f"{chosen.archive}, or its {', '.join(chosen.train | chosen.test)}"
        candidates = [root / name.format(self.classes) for root in roots for name in PYTHON]
        pickled = [
            path
            for path in candidates
            if path.is_file() or (path.is_dir() and path.name.startswith("cifar-"))
        ]
        if pickled:
            why = (
                "the python version of CIFAR is refused: it is pickle, which can run any program "
                "when read"
            )
            return f"{pickled[0]}: {why}. Allowed: {wanted} (the binary version, {PAGE})"
        return (
            f"CIFAR-{self.classes} is not in {' or '.join(map(str, roots))}; put {wanted} there, "
            f"or set `download: true` (from {PAGE}, checked)"
        )
