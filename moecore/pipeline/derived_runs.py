"""Runs below .runs/ of settings derived from a folder of pictures, or of the grid of a sweep."""

import json
import math
import re
from collections.abc import Sequence
from itertools import chain, product
from pathlib import Path
from statistics import median
from string import Template
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from moecore.core.files import UserError, find_raw_folder, write_whole
from moecore.core.source_layout import RUNS
from moecore.data.files import decode
from moecore.data.files.image_files import class_names, list_labelled_images
from moecore.data.sources.image_folder import ImageFolder
from moecore.pipeline import dvc
from moecore.pipeline.project import LOCK, hold_project
from moecore.pipeline.study_runs import write_dvc_files
from moecore.study.document import as_mapping, load_yaml_document, parse_yaml_document
from moecore.study.layers import list_folder_stages
from moecore.study.params_file import apply_assignments
from moecore.study.study import read_study

HERE = Path()
METHODS = "methods"
EXAMPLE = "-S 'methods.vmoe.router.k=[1,2,4]'"
OTHER_LETTERS = re.compile("[^a-z0-9]+")
TEMPLATE = Path(__file__).with_name("own_data.yaml")
STAGES = ("prepare", "teacher_router", "pretrain", "routing", "measure", "compare")  # no attacks
SAMPLE = 200  # pictures whose size and colour are read, evenly spread
MIN_PER_CLASS = 3  # pictures: to train, to validate, to test
MIN_SIZE = 32
MAX_SIZE = 64  # pixels: a CPU trains on them in minutes
PATCHES = 8  # per side
MAX_BATCH = 64
EPOCHS = 10
MIN_STEPS = 1200  # 90 pictures of three drawn shapes reach 90 % test accuracy
MAX_STEPS = 6000
SHOTS = (1, 5, 10, 25)


def derive_params_text(folder: Path) -> str:
    """Return a params.yaml for a folder with class folders, or with train/ and test/ of such."""
    root = find_raw_folder(str(folder), "the folder with the class folders").resolve()
    train = root / "train"
    if not train.is_dir():
        train = root
    classes = class_names(train)
    files = list_labelled_images(root, train, classes)
    sizes = np.bincount(files.labels)
    if sizes.min() < MIN_PER_CLASS:
        problem = f"{sizes.min()} pictures"
        allowed = f"{MIN_PER_CLASS} or more per class; add some, or remove the folder"
        raise UserError.at(train / classes[sizes.argmin()], found=problem, allowed=allowed)
    side, channels = _median_side_and_channels(files.paths)
    number = len(files.paths)
    size = min(max(round(side / PATCHES) * PATCHES, MIN_SIZE), MAX_SIZE)
    # Every class needs a picture in each split
    test = max(0.2, math.ceil(100 * len(classes) / number) / 100)
    validation = max(len(classes), round(0.1 * number))
    source = ImageFolder(root=str(root), size=size, test=test, validation=validation)
    counts = source.describe().without_problem().counts["train"]
    images = sum(counts)
    batch = min(MAX_BATCH, max(1, images // 4))
    per_epoch = images // batch
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        root=json.dumps(str(root), ensure_ascii=False),
        size=size,
        side=f"{side:g}",
        min_size=MIN_SIZE,
        max_size=MAX_SIZE,
        channels=channels,
        test=test,
        validation=validation,
        patch=size // PATCHES,
        batch=batch,
        max_batch=MAX_BATCH,
        epochs=min(EPOCHS, max(1, MAX_STEPS // per_epoch)),
        updates=MIN_STEPS // EPOCHS if per_epoch * EPOCHS < MIN_STEPS else "null",
        train=images,
        classes=len(classes),
        shots=[shots for shots in SHOTS if shots <= min(counts)],
        smallest=min(counts),
    )


def _median_side_and_channels(paths: list[Path]) -> tuple[float, int]:
    """Return the median shorter side in pixels, and 1 channel if all are grey, else 3."""
    sides = []
    channels = 1
    for path in paths[:: math.ceil(len(paths) / SAMPLE)]:
        try:
            pixels = decode.decode_image(path, MIN_SIZE, 3)
        except decode.UnreadableImage as error:
            raise UserError(f"{path}: {error}; repair it, or remove it") from None
        if (pixels != pixels[:1]).any():
            channels = 3
        with Image.open(path, formats=decode.FORMATS) as image:  # reads the header alone
            sides.append(min(image.size))
    return median(sides), channels


class Axis(NamedTuple):
    """One ``-S methods.METHOD.KEY=[…]``: the key below the method, and its values."""

    key: str
    values: list[Any]

    def name(self, number: int) -> str:
        """Return what a value adds to a method's name: such as k2."""
        value = self.values[number]
        if isinstance(value, dict | list):
            value = value.get("kind", number) if isinstance(value, dict) else number
        letters = OTHER_LETTERS.sub("_", json.dumps(value).lower().replace("-", "m")).strip("_")
        joint = "" if letters[:1].isdigit() else "_"
        return f"{self.key.rpartition('.')[2]}{joint}{letters}"


def write_derived_run(data: Path | None, sets: Sequence[str], is_sweep: bool) -> Path:
    """Write the folder of a run, and return it."""
    # data: a folder of pictures; None: the run is of the params.yaml here. sets: values as for
    # ``-S``; with ``is_sweep``, lists below ``methods.`` are the axes of a grid.
    path = HERE / "params.yaml"
    name = "sweep"
    if data is not None:
        path = TEMPLATE
        text = derive_params_text(data)
        name = f"data.{OTHER_LETTERS.sub('_', data.resolve().name.lower())}"
        stages = STAGES
    else:
        load_yaml_document(path)  # says where there is no project
        text = path.read_text(encoding="utf-8")
        stages = list_folder_stages(HERE)
    grid: dict[str, list[str]] = {}
    if is_sweep:
        text, grid, suffix = _expand_sweep(text, str(path), sets)
        name += f".{suffix}"
    elif sets:
        text = apply_assignments(text, sets)
    folder = HERE / RUNS / name
    with hold_project(folder / LOCK):
        write_whole(folder / "params.yaml", text)
        write_dvc_files(folder, stages)
        # A project and its runs share a cache
        config = dvc.RUN_CONFIG if (HERE / ".dvc").is_dir() else dvc.CONFIG
        write_whole(folder / ".dvc/config", config + dvc.WITHOUT_GIT)
    _refuse_equal_methods(folder / "params.yaml", [*chain.from_iterable(grid.values())])
    return folder


def _expand_sweep(
    text: str, path: str, sets: Sequence[str]
) -> tuple[str, dict[str, list[str]], str]:
    """Return a params.yaml with the methods of a grid; method → their names; the sweep's name."""
    values, swept = _split_assignments(parse_yaml_document(text, path).data, sets)
    text = apply_assignments(text, values)
    document = parse_yaml_document(text, path)
    present = document.data.get(METHODS, {})
    assignments = []
    grid: dict[str, list[str]] = {}
    for method, axes in swept.items():
        settings = document.get([METHODS, method])
        for point in product(*(range(len(axis.values)) for axis in axes)):
            chosen = list(zip(axes, point, strict=True))
            name = "_".join([method, *(axis.name(number) for axis, number in chosen)])
            if name in present or name in grid.get(method, ()):
                problem = f"two methods that would be called {name}"
                raise UserError.at(
                    f"{METHODS}.{method}", found=problem, allowed="values with other names"
                )
            grid.setdefault(method, []).append(name)
            assignments.append(f"{METHODS}.{name}={json.dumps(settings)}")
            for axis, number in chosen:
                value = json.dumps(axis.values[number])
                assignments.append(f"{METHODS}.{name}.{axis.key}={value}")
    names = list(dict.fromkeys([*document.data["run"][METHODS], *swept]))
    names = [point for name in names for point in grid.get(name, [name])]
    assignments.append(f"run.{METHODS}={json.dumps(names)}")
    keys = [axis.key.rpartition(".")[2] for axes in swept.values() for axis in axes]
    return apply_assignments(text, assignments), grid, "_".join([*swept, *keys])


def _split_assignments(data: Any, sets: Sequence[str]) -> tuple[list[str], dict[str, list[Axis]]]:
    """Return the assignments of single values, and method → axes; data: of the params.yaml."""
    values = []
    swept: dict[str, list[Axis]] = {}
    for assignment in sets:
        name, _, text = assignment.partition("=")
        value = parse_yaml_document(text, f"-S {assignment}").data if text.strip() else None
        section, method, key = [*name.strip().split(".", 2), "", ""][:3]
        if not isinstance(value, list) or isinstance(_value_at(data, (section, method)), list):
            values.append(assignment)  # run.seeds and run.methods are lists
        elif section != METHODS or not key:
            allowed = f"lists for keys below {METHODS}.NAME, such as {EXAMPLE}"
            raise UserError.at(f"-S {name}", found=f"{len(value)} values", allowed=allowed)
        elif len(value) < 2 or key in [axis.key for axis in swept.get(method, ())]:
            problem = "the key twice, or fewer than two values"
            raise UserError.at(f"-S {name}", found=problem, allowed="one list of two or more")
        else:
            swept.setdefault(method, []).append(Axis(key, value))
    if not swept:
        raise UserError.at("--sweep", found="no list to sweep over", allowed=f"such as {EXAMPLE}")
    return values, swept


def _value_at(data: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        data = as_mapping(data).get(key)
    return data


def _refuse_equal_methods(path: Path, grid: Sequence[str]) -> None:
    """Raise UserError if a method of the grid has the settings of another method that is run."""
    study = read_study(load_yaml_document(path))
    for name, other in product(grid, study.run.methods):
        if name != other and study.methods[name] == study.methods[other]:
            problem = f"the same settings as {other} has"
            raise UserError.at(f"{METHODS}.{name}", found=problem, allowed="values that differ")
