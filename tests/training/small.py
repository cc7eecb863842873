"""A tiny task for tests of the training loop, and steps with hand-made records."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from moecore.core import routing_records
from moecore.core.routing_records import Batch, ModelOutput, RoutingRecord
from moecore.data.loader import load_split_where_it_fits
from moecore.data.prepared import Split
from moecore.nn.backbones.vit import Vit
from moecore.parts import Classification, ImageSpec
from moecore.training import loop, runtime
from moecore.training.artifacts import Checkpoint
from moecore.training.job import Objective, TrainingJob
from moecore.training.method import Method, initialise_guide
from moecore.training.settings import Training

SHADES = Classification(classes=("dark", "light"))
IMAGE = ImageSpec(channels=1, size=8, task=SHADES, mean=(0.5,), std=(0.3,))
TIMED = ("images_per_second",)
CPU = runtime.Runtime("cpu", "test", 1, "system", "highest", 0.0, 0.0)
SETTINGS = Training(epochs=2, batch=8, learning_rate=1e-2, log_every=3, checkpoint_every=3)
BOTH = [{"kind": "importance"}, {"kind": "load"}]
MLPS = {"kind": "mlp", "number": 4}
VMOE = Method(router={"kind": "noisy_top_k", "k": 2}, experts=MLPS, regularizers=BOTH)
# the router, whose experts compete in half of the steps
COMPETITION = {"kind": "competition", "share": 0.5, "warmup": 0.0}
COMPETITION |= {"router_weight": 0.1, "chosen_weight": 0.1, "diversity_weight": 0.1}


def images(count: int, seed: int = 0) -> Split:
    """Dark and light noise: separable, so a model that learns at all learns it."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    pixels = random.integers(0, 120, (count, 1, 8, 8)) + 120 * labels[:, None, None, None]
    return Split(pixels.astype(np.uint8), labels.astype(np.int64))


def task(method: Method = VMOE, seed: int = 0, guide=None, image: ImageSpec = IMAGE) -> TrainingJob:
    torch.manual_seed(seed)
    model = Vit(patch=4, width=16, depth=4, heads=2).build(image, method.moe)
    train = load_split_where_it_fits(images(50), "cpu")
    validation = load_split_where_it_fits(images(20, 1), "cpu")
    objective = Objective(method.losses, distillation=method.distillation)
    return TrainingJob(model, train, validation, objective, guide, method.views)


def made(method: Method) -> TrainingJob:
    guide = None
    if method.guided:
        torch.manual_seed(0)
        guide = initialise_guide(
            Vit(patch=4, width=32, depth=2, heads=2).build(IMAGE), method, (4,)
        )
    return task(method, guide=guide)


def step_batch(job: TrainingJob, settings: Training, seed: int, step: int) -> Batch:
    return loop.batch_maker(job, settings, seed, range(step, step + 1), "cpu")(step)


def stop_training(job: TrainingJob, settings: Training, folder: Path, points: int) -> None:
    """Let a training log so many points, with checkpoints in ``folder``, and end."""
    checkpoint = Checkpoint(folder)
    run = loop.iterate_training(job, settings, 0, CPU, checkpoint)
    for _ in range(points):
        next(run)
    run.close()
    checkpoint.wait()


def assert_resumes(make: Callable, settings: Training, folder: Path, points: int) -> TrainingJob:
    """A training that is stopped and resumed ends with the same bits; return one that was not."""
    whole, resumed = make(), make()
    expected = logged_points(loop.iterate_training(whole, settings, 0, CPU))
    stop_training(make(), settings, folder, points)
    for value in resumed.learners.state_dict().values():
        value.add_(1)  # all must come from the checkpoint
    torch.rand(17)  # another process has another random state
    again = logged_points(loop.iterate_training(resumed, settings, 0, CPU, Checkpoint(folder)))
    assert again == expected[-len(again) :] and len(again) < len(expected)
    assert_same_weights(resumed, whole)
    return whole


def logged_points(metrics) -> list:
    points = [(one.step, one.values.items()) for one in metrics]
    return [(step, {name: x for name, x in values if name not in TIMED}) for step, values in points]


def assert_same_weights(one: TrainingJob, other: TrainingJob) -> None:
    ours, theirs = one.learners.state_dict(), other.learners.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def record(probs=None, load=None, logits=None):
    fields = [None if field is None else torch.as_tensor(field) for field in (logits, probs, load)]
    blank = torch.full_like(next(field for field in fields if field is not None), float("nan"))
    return RoutingRecord(*(blank if field is None else field for field in fields), blank, blank)


def step(*records, guidance=None, progress=0.0):
    blank = torch.zeros(())
    batch, output = Batch(blank, blank, blank), ModelOutput(blank, records)
    if guidance is not None:
        guidance = routing_records.Guidance(blank, tuple(map(torch.as_tensor, guidance)))
    return routing_records.ObjectiveInputs(batch, output, None, guidance, progress)
