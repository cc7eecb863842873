"""Find settings that silently do nothing: change one, train and measure, compare bit for bit.

``python -m tools.find_idle_settings --first 0 --studies 50`` draws the studies of the seeds 0, 1, …
For each setting of their first method, of the model and of the measurements, with its default too,
it writes another value. Where the check accepts that, a training of a few steps and its predictions
(or the measurement's result) are compared with those before. A line names a setting that changed
neither, and the number of studies in which it did, out of those in which it was tried.
"""

import argparse
import copy
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import chdir, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel

from moecore.core.files import UserError
from moecore.data.loader import load_split_where_it_fits
from moecore.data.prepared import Prepared
from moecore.measure.base import MeasuredModel, find_measurement
from moecore.nn.backbones.base_model import BackboneModel, ImageSpec
from moecore.nn.predict import predict_in_batches
from moecore.study.check import check_study
from moecore.study.study import Study
from moecore.training.artifacts import record_no_guide_needed, save_guide
from moecore.training.loop import iterate_training
from moecore.training.phase_trainings import (
    build_pretraining,
    build_unfitted_guide,
    iterate_router_fit,
)
from moecore.training.runtime import tune_runtime
from tools.draw_study import LEFT_OUT, StudyDrawer, write_raw_data
from tools.fuzz_studies import repair_until_accepted, write_study_files

METHOD = "m0"
TRIES = 3  # other values of a setting
NO_RESULT = ("kind", "batch", "name", "blocks", "images", "overlays", "seed")
DRAWN = ("run", "data", "model", "methods", "teacher", "teacher_router", "pretrain")


class Leaf(NamedTuple):
    """A setting: its keys in params.yaml, its class, its name there and its value."""

    keys: tuple[str | int, ...]
    model: type[BaseModel]
    name: str
    value: Any


def list_leaves(settings: BaseModel, keys: tuple[str | int, ...]) -> Iterator[Leaf]:
    """Yield all nested settings, including those at their default."""
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        place = (*keys, name)
        if name in (*NO_RESULT, *LEFT_OUT) or f"{type(settings).__name__}.{name}" in LEFT_OUT:
            continue
        if isinstance(value, BaseModel):
            yield from list_leaves(value, place)
        elif isinstance(value, tuple) and any(isinstance(item, BaseModel) for item in value):
            for index, item in enumerate(value):
                if isinstance(item, BaseModel):
                    yield from list_leaves(item, (*place, index))
        elif not isinstance(value, dict):
            yield Leaf(place, type(settings), name, value)


def set_leaf(data: dict[str, Any], keys: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """Return a copy of a study's plain data with another value at these keys."""
    changed = copy.deepcopy(data)
    holder: Any = changed
    for key in keys[:-1]:
        if isinstance(holder, dict):
            holder.setdefault(key, {})
        holder = holder[key]
    holder[keys[-1]] = value
    return changed


def accept_study(data: dict[str, Any], folder: Path) -> Study | None:
    """Return the study if the check accepts it; else None."""
    write_study_files(data, folder)
    with chdir(folder), suppress(UserError):
        return check_study("params.yaml").study
    return None


def train_and_measure(study: Study, folder: Path, trained: dict[str, Any]) -> dict[str, Any]:
    """Return section → its results as text; "" has weights and predictions.

    trained: cache of the last model, by the settings that its training depends on.
    """
    data = Prepared.open(folder / "data")
    decisive = study.model_dump_json(include=set(DRAWN))
    if decisive not in trained:
        trained.clear()
        trained[decisive] = train_model(study, data, folder)
    model, guide, bits = trained[decisive]
    results: dict[str, Any] = {"": bits}
    for section in (*study.run.measurements, *(["routing"] if study.routing else [])):
        subject = MeasuredModel(model, data, guide)
        if find_measurement(section).applies(subject) is None:
            settings = getattr(study, section)
            measured = settings.collect_result(subject, lambda name, compute: compute())
            results[section] = measured.model_dump_json()
    return results


def train_model(study: Study, data: Prepared, folder: Path) -> tuple[Any, Any, str]:
    """Return the method's trained model, its guide, and the bits of weights and predictions."""
    method = study.methods[METHOD]
    with TemporaryDirectory() as guide:
        torch.manual_seed(1)
        if method.guided or method.upcycle:
            teacher = study.teacher.build(ImageSpec.from_card(data.card)).eval()
            made = build_unfitted_guide(method, study.model, teacher, 0, "cpu")
            if len(made.routers) and not made.learns:
                train, weights = load_split_where_it_fits(data.train, "cpu"), method.teacher_router
                list(iterate_router_fit(made, train, weights, study.teacher_router, 0))
            save_guide(Path(guide), made)
        else:
            record_no_guide_needed(Path(guide))
        settings = method.merge_pretrain_settings(study.pretrain)
        job = build_pretraining(method, study.model, settings, data, Path(guide), 0, "cpu")
    runtime = tune_runtime()
    for _ in iterate_training(job, settings, 0, runtime):
        pass
    model = job.complete_model.eval()
    if isinstance(model, BackboneModel):
        model.remember(0)  # as a saved model: without memory of the training's text streams
    prediction, records = predict_in_batches(model, data.test.images[:8])
    tensors = [*model.state_dict().values(), prediction, *(record.combine for record in records)]
    bits = [tensor.double().flatten().tolist() for tensor in tensors]
    return model, job.guide, json.dumps(bits)


def find_idle_leaves(seed: int, folder: Path, raw: Path) -> Iterator[tuple[Leaf, Any, bool]]:
    """Yield (setting, other value, whether a result changed) for the study of a seed."""
    drawer = StudyDrawer(seed, raw)
    data = drawer.draw_study()
    data["run"] |= {"seeds": [0], "phases": ["pretrain"], "thorough": ["pretrain"]}
    data["data"] = {"pretrain": data["data"]["pretrain"]}
    data["pretrain"] |= {"epochs": 2, "updates": 2}
    data["methods"] = {METHOD: data["methods"][METHOD]}
    measured = data["run"]["measurements"]
    data = {name: data[name] for name in (*DRAWN, *measured, "routing") if name in data}
    study = repair_until_accepted(data, folder)
    if study is None:
        return
    study.data["pretrain"].write(folder / "data")
    trained: dict[str, Any] = {}
    before = train_and_measure(study, folder, trained)
    roots = {("methods", METHOD): study.methods[METHOD], ("model",): study.model}
    roots |= {(name,): getattr(study, name) for name in before if name}
    for keys, settings in roots.items():
        for leaf in list_leaves(settings, keys):
            for _ in range(TRIES):
                value = drawer.draw_field(leaf.model, leaf.name)
                other = (
                    None
                    if value == leaf.value
                    else accept_study(set_leaf(data, leaf.keys, value), folder)
                )
                if other is not None:
                    after = train_and_measure(other, folder, trained)
                    yield leaf, value, any(after[name] != before[name] for name in before)
                    break


def main() -> None:
    """Print the settings that changed nothing, where they did not, and a summary by name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="seed of the first study")
    parser.add_argument("--studies", type=int, default=50, help="number of seeds")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tried: dict[str, list[bool]] = defaultdict(list)
    with TemporaryDirectory() as place:
        raw = write_raw_data(Path(place) / "raw")
        for seed in range(asked.first, asked.first + asked.studies):
            folder = Path(place) / str(seed)
            folder.mkdir()
            for leaf, value, is_different in find_idle_leaves(seed, folder, raw):
                name = f"{leaf.model.__name__}.{leaf.name}"
                tried[name].append(is_different)
                if not is_different:
                    keys = ".".join(map(str, leaf.keys))
                    print(f"{seed} {keys} ({name}): {leaf.value} → {value}", flush=True)
    for name, changes in sorted(tried.items()):
        if not all(changes):
            print(f"{name}: {sum(changes)} of {len(changes)}")


if __name__ == "__main__":
    main()
