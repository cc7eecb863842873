"""Search a recipe: train dense models with a list of settings, and score them on validation images.

``python -m tools.search_recipe GRID.yaml RESULTS.jsonl WORK`` reads ``base``: ``data``, ``model``
and ``training`` as in params.yaml, ``seeds``, and ``trials``: name → changes to ``base``. Where a
world fine-tunes, ``start`` has the same three for the pretraining, and a trial its changes under
``start``. Every training is a line of RESULTS.jsonl, and is not repeated: the validation score in %
and the CPU seconds of one thread. The line ``pixels`` has classifiers on the same images. Prepared
data and models lie in WORK. No test image is read.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from moecore.core.config import Config
from moecore.core.files import atomic_folder
from moecore.data.loader import draw_few_shot_train_indices
from moecore.data.prepared import Prepared
from moecore.data.sources.base import Source
from moecore.measure.pixel_baselines import Baselines, measure_baselines
from moecore.measure.values import Found
from moecore.nn.backbones.base_model import Backbone, ImageSpec
from moecore.study.params_layers import merge_settings
from moecore.study.yaml_document import load_yaml_document
from moecore.training.artifacts import load_adapted_model, save_model
from moecore.training.job import Objective, build_training_job
from moecore.training.loop import iterate_training
from moecore.training.runtime import tune_runtime
from moecore.training.settings import Finetuning

Settings = dict[str, Any]


class Recipe(Config):
    """A dense model, its data and its training, as in params.yaml."""

    data: Source
    model: Backbone
    training: Finetuning


class Grid(Config):
    """What is searched: changes to a recipe, by name, and the seeds of each."""

    base: Settings
    start: Settings | None = None
    seeds: tuple[int, ...] = (100,)
    trials: dict[str, Settings]


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def prepare(source: Source, work: Path) -> Prepared:
    """Return the prepared data of ``source``, written to ``work`` when they are new."""
    folder = work / digest(source.model_dump(mode="json"))
    if not folder.exists():
        with atomic_folder(folder) as new:
            source.write(new)
    return Prepared.open(folder)


def train(recipe: Recipe, seed: int, work: Path, start: Path | None, target: Path) -> Settings:
    """Train, from the model in ``start`` if any; write it to ``target``; return the result."""
    settings = recipe.training
    data = prepare(recipe.data, work)
    runtime = tune_runtime("cpu")
    torch.manual_seed(seed)
    image = ImageSpec.from_card(data.card)
    if start is None:
        model = recipe.model.build(image)
    else:
        model = load_adapted_model(start, image, None)
        model.begin_finetuning()
    subset = draw_few_shot_train_indices(data, settings.shots, seed)
    objective = Objective((), settings.label_smoothing)
    job = build_training_job(model, data, objective, "cpu", subset=subset)
    began = time.process_time()
    name = f"validation_{job.task.history_name}"
    scores = []
    for metrics in iterate_training(job, settings, seed, runtime):
        if name in metrics.values:
            scores.append(metrics.values[name])
    seconds = time.process_time() - began
    with atomic_folder(target) as folder:
        save_model(folder, model)
    return {
        "validation": round(100 * scores[-1], 2),
        "seconds": round(seconds, 1),
        "epochs": [round(100 * score, 1) for score in scores],
    }


def fit_pixels(recipe: Recipe, seed: int, work: Path) -> Settings:
    """Return what the classifiers on pixels reach on the validation images."""
    data = prepare(recipe.data, work)
    data = data._replace(test=data.validation)
    began = time.process_time()
    shots = recipe.training.shots
    found = measure_baselines(data, Baselines(), shots, seed, lambda name, compute: compute())
    assert isinstance(found, Found)
    scores = {v.at["classifier"]: round(100 * v.value, 2) for v in found.all("baseline")}
    return {"validation": scores, "seconds": round(time.process_time() - began, 1)}


def iterate_results(grid: Grid, done: set[str], work: Path) -> Iterator[Settings]:
    """Yield a line for each training that is not ``done``, and for the classifiers on pixels."""
    for name, changes in {**grid.trials, "pixels": {}}.items():
        settings = merge_settings(grid.base, {k: v for k, v in changes.items() if k != "start"})
        first = None
        if grid.start is not None:
            first = merge_settings(grid.start, changes.get("start", {}))
        for seed in grid.seeds:
            recipe = Recipe(**settings)
            key = digest([settings, first, seed])
            if name == "pixels":
                key = digest([settings["data"], recipe.training.shots, seed])
            if key in done:
                continue
            start = None
            if name == "pixels":
                found = fit_pixels(recipe, seed, work)
            else:
                before = {}
                if first is not None:
                    start = work / "models" / digest([first, seed])
                    if not start.exists():
                        before = train(Recipe(**first), seed, work, None, start)
                found = train(recipe, seed, work, start, work / "models" / key)
                if before:
                    found["start"] = before
            changed = {"settings": settings, "start_settings": first}
            yield {"key": key, "trial": name, "seed": seed, **found, **changed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("grid", "results", "work"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    grid = Grid(**load_yaml_document(arguments.grid).data)
    torch.set_num_threads(1)
    done = set()
    if arguments.results.exists():
        done = {json.loads(line)["key"] for line in arguments.results.read_text().splitlines()}
    (arguments.work / "models").mkdir(parents=True, exist_ok=True)
    for line in iterate_results(grid, done, arguments.work):
        with arguments.results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        names = ("trial", "seed", "validation", "seconds", "epochs", "start")
        print({name: line[name] for name in names if name in line}, flush=True)


if __name__ == "__main__":
    main()
