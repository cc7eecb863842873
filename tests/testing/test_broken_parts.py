"""A part that breaks a promise is named with that promise, in one line."""

from typing import Literal

import pytest
import torch

from moecore.attacks.fgsm import Fgsm
from moecore.core.config import Config
from moecore.core.routing_records import RoutingContext
from moecore.data.sources.digits import Digits
from moecore.measure.base import Measurement
from moecore.nn.backbones.vit import Vit
from moecore.nn.experts.mlp import Mlp, MlpExperts
from moecore.nn.kernels.grouped import full_precision
from moecore.nn.routers.noisy_top_k import NoisyTopK, NoisyTopKRouter
from moecore.nn.routers.token_choice import router_logits
from moecore.tasks.regression import Regression
from moecore.testing import (
    check_attack,
    check_backbone,
    check_experts,
    check_measurement,
    check_regularizer,
    check_router,
    check_source,
    check_task,
    check_teacher,
)
from moecore.training.regularizers.base import Regularizer
from moecore.training.regularizers.load import Load
from moecore.training.teachers.base import Teacher


class Sound(NoisyTopKRouter):
    """Breaks nothing; others change what it scores."""

    def forward(self, tokens, context=RoutingContext()):
        with full_precision(tokens):
            return self.decide(self.scores(tokens))

    def scores(self, tokens):
        return router_logits(tokens, self.weight)


class Rounded(Sound):
    def forward(self, tokens, context=RoutingContext()):
        return self.decide(torch.nn.functional.linear(tokens, self.weight).float())


class Coupled(Sound):
    def scores(self, tokens):
        return super().scores(tokens - tokens.mean(dim=(0, 1)))


class LooksAhead(Sound):
    def scores(self, tokens):
        return super().scores(tokens.roll(-1, dims=1))


class Noisy(Sound):
    def scores(self, tokens):
        return super().scores(tokens + torch.randn_like(tokens))


class Unscaled(Sound):
    def decide(self, logits):
        plan, record = super().decide(logits)
        return plan, record._replace(probs=2 * record.probs)


class Doubled(Sound):
    def decide(self, logits):
        plan, record = super().decide(logits)
        return plan._replace(weights=2 * plan.weights), record


class Deaf(Sound):
    def decide(self, logits):
        return super().decide(logits.detach())


class Forgetful(Sound):
    seen = 0.0

    def scores(self, tokens):
        self.seen += self.training
        return super().scores(tokens) * (1 + self.seen * self.training)


@pytest.mark.parametrize(
    ("module", "promise"),
    [
        (Rounded, "under bf16 autocast"),
        (Coupled, "routed the same in any batch"),
        (LooksAhead, "a later token"),
        (Noisy, "evaluation draws no number"),
        (Unscaled, "probs of a token sum to 1"),
        (Doubled, "the sum of all experts, weighted by combine"),
        (Deaf, "reaches the router"),
        (Forgetful, "is resumed from its state_dict"),
    ],
)
def test_a_router(module, promise):
    class Cosine(NoisyTopK):
        def build(self, width, experts, basis=None):
            return sound_or_broken(self, width, experts)

    sound_or_broken = Sound
    check_router(Cosine)
    sound_or_broken = module
    with pytest.raises(AssertionError, match=f"^Cosine: .*{promise}") as failure:
        check_router(Cosine)
    assert "\n" not in str(failure.value)


class Mixed(MlpExperts):
    def forward(self, rows):
        return super().forward(rows._replace(values=rows.values - rows.values.mean(dim=0)))


def test_experts():
    class Blended(Mlp):
        def build(self, width):
            return Mixed(self, width)

    with pytest.raises(AssertionError, match="^Blended: a row depends on no other row$"):
        check_experts(Blended)


class Quiet(Regularizer):
    kind: Literal["quiet"] = "quiet"
    weight: float = 0.1

    def __call__(self, step):
        return sum(record.logits.square().mean() for record in step.output.routing)


class Weighted(Load):
    def __call__(self, step):
        return self.weight * super().__call__(step)


@pytest.mark.parametrize(
    ("regularizer", "promise"),
    [(Quiet, "without routing it raises a UserError"), (Weighted, "not multiplied by weight")],
)
def test_a_regularizer(regularizer, promise):
    with pytest.raises(AssertionError, match=f"^{regularizer.__name__}: .*{promise}"):
        check_regularizer(regularizer)


def test_an_attack():
    class Strong(Fgsm):
        def perturb_images(self, at, ball, generator):
            return (ball.centre + 2 * ball.epsilon).clamp(0, 1)

    with pytest.raises(AssertionError, match="^Strong: no pixel moves by more than ε$"):
        check_attack(Strong)


class Mingled(Vit):
    def build(self, image, moe=None):
        model = super().build(image, moe)
        model.norm.register_forward_hook(lambda norm, given, out: out - out.mean(dim=0))
        return model


class Drawn(Teacher):
    kind: Literal["drawn"] = "drawn"

    def build(self, image):
        return Vit(patch=4, width=16, depth=1, heads=2).build(image)


class Summed(Regression):
    def loss(self, prediction, labels, label_smoothing=0.0, reduction="mean"):
        return super().loss(prediction, labels, reduction="none").sum()


class Restless(Digits):
    calls: list[int] = []

    def write(self, folder):
        self.calls.append(1)
        return self.model_copy(update={"seed": len(self.calls)}).write_digits(folder)

    write_digits = Digits.write


YEARS = torch.tensor([40.0, 60.0]).numpy()


@pytest.mark.parametrize(
    ("check", "part", "promise"),
    [
        (
            check_backbone,
            Mingled(patch=4, width=16, depth=1, heads=2),
            "the same outputs in any batch",
        ),
        (check_teacher, Drawn(), "the same for every seed"),
        (lambda task: check_task(task, torch.ones(2, 1), YEARS, YEARS), Summed(target="age"), "B,"),
    ],
)
def test_what_is_built_and_learned(check, part, promise):
    with pytest.raises(AssertionError, match=f"^{type(part).__name__}: .*{promise}"):
        check(part)


def test_a_source(tmp_path):
    with pytest.raises(AssertionError, match="^Restless: the same settings write the same bytes$"):
        check_source(Restless(), tmp_path)


class Result(Config):
    mean: float


class Brightness(Measurement):
    noisy: bool = False
    calls: list[int] = []

    def measure(self, subject, parts):
        self.calls.append(1)
        if self.noisy:
            torch.rand(1)
        return Result(mean=len(self.calls) + parts("mean", lambda: 0.5))


@pytest.mark.parametrize(
    ("noisy", "promise"), [(True, "draws no global number"), (False, "killed after any piece")]
)
def test_a_measurement(noisy, promise):
    with pytest.raises(AssertionError, match=f"^Brightness: .*{promise}"):
        check_measurement(Brightness(noisy=noisy, calls=[]))
