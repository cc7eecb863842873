"""What a part is combined with in a params.yaml, so that it can refuse before anything runs.

``moecore check`` calls ``misfits`` of every settings object: for the file alone, again when the
data are known, and again with the sizes of the model, which is built without memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Misfits = Iterator[tuple[tuple, str]]  # keys below the settings, and a message


class Surroundings(NamedTuple):
    """What a part is combined with. None, (), {} and "" mean nothing, or not known yet."""

    # of a method, or of its text tower
    router: Any = None  # the nearest Router that contains the part, or of the same method
    experts: Any = None  # Experts
    losses: Sequence[Any] = ()  # Regularizers, including those that the method adds
    provided: frozenset[str] = frozenset()  # what regularizers may need
    images: Mapping[str, int] = {}  # phase → images per step, each view counted
    # of a model of that method
    layers: int | None = None  # number of layers with experts
    tokens: int | None = None  # per step, in the layer with the fewest
    special: bool | None = None  # whether there are class tokens
    truth: bool | None = None  # whether the kind of each token is known
    # of the data that the settings work on
    phase: str = ""  # key below ``data``, or "teacher"
    source: Any = None  # Source
    preview: Any = None  # the Card of the data

    @property
    def data(self) -> str:
        """Return the key of the data in params.yaml."""
        return "teacher.data" if self.phase == "teacher" else f"data.{self.phase}"

    @property
    def task(self) -> Any:
        """Return the class of the task that the labels belong to; None without data."""
        return None if self.source is None else self.source.labels_task

    @property
    def is_text(self) -> bool:
        """Return whether the data are text."""
        return self.source is not None and self.task.of_text

    @property
    def has_truth(self) -> bool:
        """Return whether the data have the kind of each token."""
        return self.preview is not None and bool(self.preview.truth)

    def lacks(self, what: str) -> str | None:
        """Return why the labels do not allow ``what`` (see ``Task.needs_classes``), or None."""
        return None if self.source is None else self.task.needs_classes(what)


def changed_settings(
    settings: Any, names: Iterable[str], why: str, allowed: str
) -> Iterator[tuple[tuple, str]]:
    """Yield the settings among ``names`` that have no effect but differ from their defaults."""
    for name in names:
        value = getattr(settings, name)
        if value != type(settings).model_fields[name].default:
            yield (name,), f"found {value}, but {why}; allowed: leave it out, or {allowed}"


def format_changed_settings(value: Any) -> str:
    """Return a text of how settings differ from their defaults."""
    if hasattr(value, "model_dump"):
        return str(value.model_dump(exclude_defaults=True) or "it")
    return str(value)
