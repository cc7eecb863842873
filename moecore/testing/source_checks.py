"""What every data source promises, as a function that a test calls in one line."""

from pathlib import Path

import numpy as np
import torch

from moecore.core.files import UserError, read_json
from moecore.core.outside_packages import more_packages, outside_kinds_in_settings
from moecore.data.prepared import SPLITS, Prepared
from moecore.data.sources.base import PlannedData, Source, planned_data_from_card
from moecore.testing.check_helpers import assert_that, settings_of


def check_source(source: Source | type[Source], folder: Path) -> Prepared:
    """Raise AssertionError, in one line, where a source breaks a promise; return what it wrote.

    source: settings, or their class, whose defaults are then checked: of small data, which are
    prepared twice, below ``folder``. They have the layout of moecore/data/prepared.py and nothing
    beside it, labels of the task, and what ``preview`` foresaw. The same settings write the same
    bytes, whatever was drawn before.
    """
    settings = settings_of(source)
    planned = check_source_preview(settings)
    card, again = settings.prepare(folder / "first"), settings.prepare(folder / "second")
    assert_that(settings, again == card, "the same settings write the same bytes")
    try:
        with more_packages({kind.partition(".")[0] for kind in outside_kinds_in_settings(card)}):
            data = Prepared.open(folder / "first", verify=True)
    except UserError as error:
        raise AssertionError(f"{type(settings).__name__}: what it wrote opens: {error}") from error
    assert_that(settings, read_json(data.folder / "card.json") == card, "it returns its card")
    names = sorted(path.name for path in data.folder.iterdir())
    promise = "the folder has the card's files and nothing else"
    assert_that(settings, names == sorted([*card["files"], "card.json"]), promise)
    assert_that(settings, isinstance(data.task, settings.task), "its labels are of its task")
    for split in data[1:4]:
        data.task.check(np.asarray(split.labels), f"{type(settings).__name__}: labels")
    volumes = data.test.images.ndim == 5
    assert_that(settings, volumes == settings.volumes, "volumes says whether images have 3 axes")
    if planned is not None:
        _check_preview(settings, planned, planned_data_from_card(card))
    return data


def check_source_preview(source: Source | type[Source]) -> PlannedData | None:
    """Raise AssertionError, in one line, where ``preview`` breaks a promise; return what it says.

    source: settings, or their class, whose defaults are then checked; nothing is prepared. It says
    the same twice and draws nothing. Its task is that of the source, ``volumes`` says whether
    images have three axes, and images are counted by split.
    """
    settings = settings_of(source)
    before = torch.get_rng_state()
    planned, again = settings.preview(), settings.preview()
    assert_that(settings, planned == again, "preview says the same twice")
    assert_that(settings, torch.equal(before, torch.get_rng_state()), "preview draws no number")
    if planned is None or planned.problem is not None:
        return planned
    fits = planned.task is None or isinstance(planned.task, settings.task)
    assert_that(settings, fits, "preview foresees labels of its task")
    is_volume = len(planned.shape) == 3
    assert_that(settings, is_volume == settings.volumes, "volumes says whether images have 3 axes")
    fits = not planned.counts or set(planned.counts) == set(SPLITS)
    assert_that(settings, fits, f"counts has {', '.join(SPLITS)}")
    return planned


def _check_preview(settings: Source, planned: PlannedData, written: PlannedData) -> None:
    problem = planned.problem
    assert_that(settings, problem is None, f"its preview sees no problem ({problem})")
    wrong = [
        name
        for name in ("name", "channels", "shape", "classes", "images", "regions", "truth")
        if getattr(planned, name) not in (None, {}, getattr(written, name))
    ]
    assert_that(settings, not wrong, f"preview foresees {', '.join(wrong)}")
