"""What two ranks compute beside one: ``local_ranks`` starts it, test_ranks.py reads what it wrote.

Each rank first trains alone, on whole batches, then joins the other and trains its half of them.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from moecore.core.files import UserError
from moecore.core.ranks import join, leave, ranks, whole_of
from moecore.core.sources import ROOT
from moecore.data.views.mix import Mix
from moecore.data.views.views import ViewSettings
from moecore.nn.backbones.vit import Vit
from moecore.study.document import load
from moecore.training.adversarial import Adversarial
from moecore.training.guide import build_guide
from moecore.training.job import Job
from moecore.training.loop import fit
from moecore.training.method import Method
from moecore.training.settings import Training
from tests.training import test_isolation
from tests.training.small import CPU, IMAGE, task
from tests.volumes import balls

ENTRIES = {
    **load(str(ROOT / "params.yaml")).data["methods"],
    "capacity": {
        "router": {"kind": "noisy_top_k", "k": 2, "capacity_factor": 1.0, "group_size": 4},
        "experts": {"kind": "mlp", "number": 4},
        "regularizers": [{"kind": "load"}],
    },
}
METHODS = {name: Method.model_validate(entry) for name, entry in ENTRIES.items()}
SETTINGS = Training(
    epochs=4, batch=16, learning_rate=1e-3, log_every=1, clip=None, views=ViewSettings(shift=1)
)
MORE = {  # settings that draw, or compute, over the whole batch; all with V-MoE
    "mix": {"mix": Mix(mixup=0.4, cutmix=1.0)},
    "clip": {"clip": 0.05},
    "adversarial": {"adversarial": Adversarial(steps=2, form="strong"), "views": ViewSettings()},
    "sgd": {"optimizer": {"kind": "sgd"}, "weight_decay": 0.0},
}


def made(method: Method) -> Job:
    torch.manual_seed(0)
    guide = None
    if method.guided:
        guide = build_guide(Vit(patch=4, width=32, depth=2, heads=2).build(IMAGE), method, 4)
    return task(method, guide=guide)


def cases():
    """Name → (job, settings)."""
    for name, method in METHODS.items():
        yield name, made(method), SETTINGS
    for name, changed in MORE.items():
        settings = Training.model_validate(SETTINGS.model_dump() | changed)
        yield name, made(METHODS["vmoe"]), settings
    torch.manual_seed(0)
    dropping = Vit(patch=4, width=16, depth=4, heads=2, drop_path=0.4)
    model = dropping.build(IMAGE, METHODS["vmoe"].moe)
    yield "drop_path", made(METHODS["vmoe"])._replace(model=model), SETTINGS
    with tempfile.TemporaryDirectory() as folder:
        job = test_isolation.task(balls(Path(folder)))
        yield "regions", job, test_isolation.SETTINGS.model_copy(update={"log_every": 1})


def trained(job: Job, settings: Training) -> dict:
    """The first gradient, all loss terms of the first step, and the weights at the end."""
    gradients = []

    def keep(optimizer, *_):
        if not gradients:
            every = [one for group in optimizer.param_groups for one in group["params"]]
            found = [whole_of(one.grad).flatten() for one in every if one.grad is not None]
            gradients.append(torch.cat([one.double() for one in found]))

    hook = register_optimizer_step_pre_hook(keep)
    points = [metrics.values for metrics in fit(job, settings, 0, CPU)]
    hook.remove()
    terms = {
        name: value
        for name, value in points[0].items()
        if name not in ("images_per_second", "learning_rate", "memory_mb")
        and not name.startswith("validation")
    }
    weights = torch.cat([one.detach().double().flatten() for one in job.learners.parameters()])
    return {"gradient": gradients[0], "terms": terms, "weights": weights}


def main(target: str, shards: str) -> None:
    torch.manual_seed(0)
    alone = {name: trained(job, settings) for name, job, settings in cases()}
    join()
    found: dict[str, dict] = {}
    for shard in map(int, shards.split(",")):
        for name, job, settings in cases():
            both = trained(job, settings.model_copy(update={"shard": shard}))
            one = alone[name]
            away = (both["gradient"] - one["gradient"]).norm() / one["gradient"].norm()
            found[f"{name} {ranks().size // shard}×{shard}"] = {
                "gradient": float(away),
                "terms": {
                    term: abs(both["terms"][term] - value) / max(1.0, abs(value))
                    for term, value in one["terms"].items()
                },
                "weights": float((both["weights"] - one["weights"]).abs().max()),
            }
    refused = {}
    for name, settings in {
        "batch": {"batch": 15},
        "shard": {"shard": 3},
        "group": {"batch": 10},
    }.items():
        try:
            next(fit(made(METHODS["capacity"]), SETTINGS.model_copy(update=settings), 0, CPU))
        except UserError as error:
            refused[name] = str(error)
    first = ranks().first
    leave()
    if first:
        Path(target).write_text(json.dumps({"found": found, "refused": refused}))


if __name__ == "__main__":
    main(*sys.argv[1:])
