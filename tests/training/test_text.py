"""A language model is trained by the one loop; what its streams left behind is part of the
state.
"""

import pytest
import torch

from moecore.core.tensors import read_tensors
from moecore.data.loader import to_device
from moecore.data.prepared import Split
from moecore.data.text.stream import Stream
from moecore.data.text.words import windows
from moecore.nn.backbones.image import ImageSpec
from moecore.nn.backbones.language_model import LanguageModel
from moecore.nn.predict import evaluating, scores_of_blocks
from moecore.tasks.next_token import NextToken
from moecore.training.artifacts import load_model, save_model
from moecore.training.checkpoint import Checkpoint
from moecore.training.job import Job
from moecore.training.loop import fit
from moecore.training.method import Method
from moecore.training.objective import Objective
from moecore.training.settings import Training
from tests.training.small import CPU

WORDS, BLOCK, CONTEXT = 12, 4, 2
SPEC = ImageSpec(
    channels=CONTEXT + 1,
    size=(BLOCK,),
    mean=(0.0,) * (CONTEXT + 1),
    std=(1.0,) * (CONTEXT + 1),
    task=NextToken(words=WORDS),
)
SMOE = Method(
    router={"kind": "top_k_softmax", "k": 2},
    experts={
        "kind": "mlp",
        "number": 4,
        "hidden_ratio": 1,
        "activation": "relu",
        "init": "flat",
        "dropout": 0.1,
    },
    blocks="all",
    regularizers=[{"kind": "group_sparsity", "weight": 1e-2}, {"kind": "load"}],
)
SETTINGS = Training(
    epochs=2,
    updates=6,
    batch=8,
    learning_rate=1e-2,
    weight_decay=0,
    optimizer={"kind": "adam"},
    clip=None,
    log_every=1,
    checkpoint_every=2,
)


def counting(length: int, seed: int) -> torch.Tensor:
    """A text in which most words follow from the one before."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.where(torch.rand(length, generator=generator) < 0.1, 2, 1)
    return (steps.cumsum(0) % WORDS).int()


def text(method: Method = SMOE, settings: Training = SETTINGS, **model) -> Job:
    torch.manual_seed(0)
    given = {"width": 8, "depth": 2, "heads": 2, "span": 4, "dropout": 0.1} | model
    made = LanguageModel(**given).build(SPEC, method.moe)
    made.remember(settings.batch)
    split = Split(*windows(counting(60, 1).numpy(), BLOCK, CONTEXT))
    train = Stream(counting(300, 0), BLOCK)
    return Job(made, train, to_device(split, "cpu"), Objective(method.losses))


def weights(job: Job) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in job.model.state_dict().items()}


def test_it_learns_what_follows():
    settings = SETTINGS.model_copy(update={"epochs": 12})
    job = text(settings=settings)
    values = [point.values for point in fit(job, settings, 0, CPU)]
    ends = [one["validation_nats"] for one in values if "validation_nats" in one]
    assert len(ends) == 12 and ends[-1] < 0.6 * ends[0]


@pytest.mark.parametrize("stop", [3, 9])
def test_killed_and_resumed_it_ends_with_the_same_bits(tmp_path, stop):
    whole = text()
    for _ in fit(whole, SETTINGS, 0, CPU):
        pass
    killed = text()
    begun = Checkpoint(tmp_path)
    running = fit(killed, SETTINGS, 0, CPU, begun)
    for point in running:
        if point.step == stop:
            break
    running.close()
    begun.wait()
    kept = Checkpoint(tmp_path)
    again = text()
    points = [point.step for point in fit(again, SETTINGS, 0, CPU, kept)]
    assert 1 < points[0] <= stop and points[-1] == 12
    assert all(torch.equal(value, weights(again)[name]) for name, value in weights(whole).items())
    saved, _ = read_tensors(kept.path)
    assert saved["model.model.memory.states"].any(), "what the streams left is in the checkpoint"


def test_what_is_saved_is_the_model_alone(tmp_path):
    job = text()
    for _ in fit(job, SETTINGS, 0, CPU):
        pass
    save_model(tmp_path, job.model)
    assert not any("memory" in name for name in read_tensors(tmp_path / "model.safetensors")[0])
    loaded = load_model(tmp_path)
    images, labels = (torch.tensor(part) for part in windows(counting(60, 1).numpy(), 4, 2))
    with evaluating(job.model):
        torch.testing.assert_close(loaded(images).prediction, job.model(images).prediction)
    assert scores_of_blocks(loaded, images, labels).shape == (14,)


@torch.no_grad()
def test_perplexity_is_that_of_the_stream():
    job = text()
    tokens = counting(62, 2)
    model = job.model.eval()
    states = model.nothing(1, tokens.device)
    nats = []
    for start in range(0, 61, 5):
        words = tokens[None, start : start + 5][:, : 61 - start]
        (final, _, _), states = model.read(words, states)
        following = tokens[None, start + 1 : start + 1 + words.shape[1]].long()
        nats.append(model.image.task.token_loss(model.predict(final), following).flatten())
    every = torch.cat(nats)
    assert len(every) == 61
    assert abs(model.perplexity(tokens, 1, whole=False) - float(every.mean().exp())) < 1e-4
    assert abs(model.perplexity(tokens, 1) - float(every[:60].mean().exp())) < 1e-4
    two = torch.cat([tokens[:31], tokens[31:]]).view(2, 31)
    apart = [model.perplexity(part, 1) for part in two]
    together = torch.tensor(apart).log().mean().exp()
    assert abs(model.perplexity(tokens, 2) - float(together)) < 1e-4, "each from an empty cache"
