"""A part that breaks a promise is named with that promise, in one line."""

from typing import ClassVar, Literal

import pytest
import torch

from moecore import testing
from moecore.attacks.fgsm import Fgsm
from moecore.core.config import Config
from moecore.core.routing_records import RoutingContext
from moecore.data.sources.digits import Digits
from moecore.data.sources.image_folder import ImageFolder
from moecore.measure.base import Measurement
from moecore.measure.calibrators.base import Calibrator
from moecore.nn.backbones.vit import Vit
from moecore.nn.experts.mlp import Mlp, MlpExperts
from moecore.nn.kernels.grouped import full_precision
from moecore.nn.routers.noisy_top_k import NoisyTopK, NoisyTopKRouter
from moecore.nn.routers.token_choice import router_logits
from moecore.tasks.regression import Regression
from moecore.training.regularizers.base import Regularizer
from moecore.training.regularizers.load import Load
from moecore.training.teachers.base import Teacher


class Sound(NoisyTopKRouter):
    """Breaks nothing; others change one of its methods."""

    seen = 0.0

    def forward(self, tokens, context=RoutingContext()):
        with full_precision(tokens):
            return self.decide(self.scores(tokens))

    def scores(self, tokens):
        return router_logits(tokens, self.weight)


def round_logits(self, tokens, context=None):
    return self.decide(torch.nn.functional.linear(tokens, self.weight).float())


def scale_probs(self, logits):
    plan, record = Sound.decide(self, logits)
    return plan, record._replace(probs=2 * record.probs)


def double_weights(self, logits):
    plan, record = Sound.decide(self, logits)
    return plan._replace(weights=2 * plan.weights), record


def count_calls(self, tokens):
    self.seen += self.training
    return Sound.scores(self, tokens) * (1 + self.seen * self.training)


def scores_of(change):
    return {"scores": lambda self, tokens: Sound.scores(self, change(tokens))}


@pytest.mark.parametrize(
    ("methods", "promise"),
    [
        ({"forward": round_logits}, "under bf16 autocast"),
        (scores_of(lambda tokens: tokens - tokens.mean(dim=(0, 1))), "same in any batch"),
        (scores_of(lambda tokens: tokens.roll(-1, dims=1)), "a later token"),
        (scores_of(lambda tokens: tokens + torch.randn_like(tokens)), "evaluation draws no number"),
        ({"decide": scale_probs}, "probs of a token sum to 1"),
        ({"decide": double_weights}, "the sum of all experts, weighted by combine"),
        (
            {"decide": lambda self, logits: Sound.decide(self, logits.detach())},
            "reaches the router",
        ),
        ({"scores": count_calls}, "is resumed from its state_dict"),
    ],
)
def test_a_router(methods, promise):
    class Cosine(NoisyTopK):
        def build(self, width, experts, basis=None):
            return built(self, width, experts)

    built = Sound
    testing.check_router(Cosine)
    built = type("Broken", (Sound,), methods)
    with pytest.raises(AssertionError, match=f"^Cosine: .*{promise}") as failure:
        testing.check_router(Cosine)
    assert "\n" not in str(failure.value)


class Mixed(MlpExperts):
    def forward(self, rows):
        return super().forward(rows._replace(values=rows.values - rows.values.mean(dim=0)))


class Blended(Mlp):
    def build(self, width):
        return Mixed(self, width)


class Quiet(Regularizer):
    kind: Literal["quiet"] = "quiet"
    weight: float = 0.1

    def __call__(self, step):
        return sum(record.logits.square().mean() for record in step.output.routing)


class Weighted(Load):
    def __call__(self, step):
        return self.weight * super().__call__(step)


class Strong(Fgsm):
    def perturb_images(self, at, ball, generator):
        return (ball.centre + 2 * ball.epsilon).clamp(0, 1)


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


class Counted(NoisyTopK):
    def build(self, width, experts, basis=None):
        module = super().build(width, experts, basis)
        return module if module.weight.sum().item() else None


class Unsaid(Calibrator):
    kind: Literal["unsaid"] = "unsaid"
    predicts: ClassVar = "numbers"
    tasks: ClassVar = ("regression",)

    def fit(self, predictions, labels, groups=None):
        raise NotImplementedError


YEARS = torch.tensor([40.0, 60.0]).numpy()


@pytest.mark.parametrize(
    ("check", "part", "promise"),
    [
        ("experts", Blended(), "a row depends on no other row$"),
        ("regularizer", Quiet(), "without routing it raises a UserError"),
        ("regularizer", Weighted(), "not multiplied by weight"),
        ("attack", Strong(), "no pixel moves by more than ε$"),
        ("backbone", Mingled(patch=4, width=16, depth=1, heads=2), "same outputs in any batch"),
        ("teacher", Drawn(), "the same for every seed"),
        ("task", Summed(target="age"), "B,"),
        ("source", Restless(), "the same settings write the same bytes$"),
        ("measurement", Brightness(noisy=True, calls=[]), "draws no global number"),
        ("measurement", Brightness(calls=[]), "killed after any piece"),
        ("router", Counted(), r"it builds on the meta device, .*\.item\(\)"),
        ("calibrator", Unsaid(), r"set the class attribute fitted, .* \(docs/api\.md\)$"),
    ],
)
def test_another_part(check, part, promise, tmp_path):
    more = {"task": (torch.ones(2, 1), YEARS, YEARS), "source": (tmp_path,)}.get(check, ())
    with pytest.raises(AssertionError, match=f"^{type(part).__name__}: .*{promise}"):
        getattr(testing, f"check_{check}")(part, *more)


def test_a_class_whose_settings_have_no_default():
    with pytest.raises(AssertionError, match="^ImageFolder: .*root.* without default: pass"):
        testing.check_source_preview(ImageFolder)
