"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), *binary* version: 50,000 + 10,000, 32×32."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from moecore.data.files.published_image_sets import (
    LabelledImages,
    PublishedSetFacts,
    PublishedSource,
)
from moecore.data.sources.cifar import SETS, fetch_archive, read_binary

PAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
# files of the version that is refused
PYTHON = (
    "cifar-{}-python.tar.gz",
    "cifar-10-batches-py/data_batch_1",
    "cifar-100-python/train",
    "data_batch_1",
    "train",
    "meta",
)


class Cifar(PublishedSource):
    """The binary files or the authors' archive; the python version is refused: it is pickle."""

    kind: Literal["cifar"] = "cifar"
    classes: Literal[10, 100] = Field(
        10, description="10: CIFAR-10; 100: CIFAR-100 with its fine labels"
    )
    root: str | tuple[str, ...] = Field(
        "data/raw/cifar", description="Folder, or folders in order, with the .bin files or archive"
    )
    size: int = Field(
        32, ge=4, le=1024, description="Height and width in pixels; bilinear where not 32"
    )

    def facts(self) -> PublishedSetFacts:
        """Return what is known of the set."""
        chosen = SETS[self.classes]
        name = f"CIFAR-{self.classes}"
        train, test = (sum(files.values()) for files in (chosen.train, chosen.test))
        licence = "none stated by the authors"
        return PublishedSetFacts(name, chosen.names, 3, licence, PAGE, train, test)

    def fetch_files(self, root: Path) -> Path:
        """Download the archive into ``root``, checked."""
        return fetch_archive(SETS[self.classes], root)

    def read_sets(self, place: Path) -> tuple[LabelledImages, LabelledImages]:
        """The authors' training and test sets. Raises UserError where a file is damaged."""
        chosen = SETS[self.classes]
        return read_binary(place, chosen, chosen.train), read_binary(place, chosen, chosen.test)

    def find_files(self, roots: list[Path]) -> Path | None:
        """The first folder with all .bin files, or archive."""
        chosen = SETS[self.classes]
        for root in roots:
            for folder in (root, root / chosen.folder):
                if all((folder / name).is_file() for name in chosen.train | chosen.test):
                    return folder
            if (root / chosen.archive).is_file():
                return root / chosen.archive
        return None

    def describe_absence(self, roots: list[Path]) -> str:
        """Say what is wanted, and how to get it."""
        chosen = SETS[self.classes]
        wanted = f"{chosen.archive}, or its {', '.join(chosen.train | chosen.test)}"
        candidates = [root / name.format(self.classes) for root in roots for name in PYTHON]
        pickled = [path for path in candidates if path.is_file()]
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
