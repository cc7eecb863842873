"""Our parts keep the promises of moecore.testing; a broken promise is named in one line."""

from typing import ClassVar, Literal

import pytest
import torch

from moecore import backbones, experts, regularizers, routers, testing
from moecore.attacks import Apgd, Autoattack, Fab, Fgsm, Pgd, Square, Surrogate
from moecore.backbones import TextTowerSettings, Vit
from moecore.core.config import builtin_kinds, part_classes_by_kind
from moecore.core.routing_records import RoutingContext
from moecore.data.card import parse_card_task
from moecore.measure.base import Measurement, builtin_measurements
from moecore.measure.values import Chart, Metric, OnPage
from moecore.nn.experts.mlp import Mlp, MlpExperts
from moecore.nn.kernels.grouped import full_precision
from moecore.nn.routers.noisy_top_k import NoisyTopK, NoisyTopKRouter
from moecore.nn.routers.token_choice import router_logits
from moecore.parts import Attack, Balance, Calibrator, ImageSpec, Regularizer, Teacher
from moecore.sources import Digits, ImageFolder
from moecore.tasks.regression import Regression
from moecore.teachers import Dense, Training
from moecore.testing.check_helpers import IMAGE
from moecore.training.regularizers.load import Load

CAPACITY = {"capacity_factor": 0.5, "batch_priority": True}
BIAS = {"kind": "loss_free", "rate": 0.1}
ORDERED = {"k": 1, "capacity_factor": 0.5, "group_size": 1}  # causal: seats in the words' order
ROUTERS = [
    *(routers.NoisyTopK(k=k) for k in (1, 2)),
    routers.NoisyTopK(renormalise=True),
    routers.NoisyTopK(renormalise="straight", task_gradient=False),
    routers.NoisyTopK(**CAPACITY, group_size=2),
    routers.NoisyTopK(eval_capacity_factor=0.5, group_size=2),
    routers.NoisyTopK(**ORDERED),
    routers.NoisyTopK(score="sigmoid", renormalise=True, scale=2.5, balance=BIAS),
    routers.NoisyTopK(score="sqrt_softplus", start="orthonormal", input_jitter=0.1),
    routers.NoisyTopK(balance=BIAS, groups={"number": 2, "kept": 2, "per_group": 1}),
    routers.NoisyTopK(k=1, eval_capacity_factor=0.5, group_size=1),
    *(routers.TopKSoftmax(k=k, noise_std=1.0) for k in (1, 2)),
    routers.TopKSoftmax(balance=BIAS, groups={"number": 2, "kept": 2, "per_group": 1}),
    routers.TopKSoftmax(score="sigmoid", start="orthonormal", **ORDERED),
    routers.Cosine(balance=BIAS, noise_std=1.0),
    routers.NoisyTopK(residual=True, input_jitter=0.1),
    *(routers.TopP(k=k) for k in (3, None)),
    routers.TopP(balance=BIAS),
    routers.Relu(),
    routers.Dynamic(),
    *(
        routers.Competition(
            router_weight=0.01, chosen_weight=0.1, diversity_weight=0.1, balance=balance
        )
        for balance in (None, BIAS, {"kind": "quantile"}, {"kind": "sinkhorn"})
    ),
    *(routers.Merged(normalise=normalise) for normalise in (True, False)),
    *(routers.Depth(share=0.3, sampling=how) for how in (None, "bce", "predictor")),
    routers.Depth(share=0.5, router=routers.NoisyTopK(**CAPACITY, group_size=2)),
    routers.Depth(share=0.5, router=routers.NoisyTopK(score="sigmoid", balance=BIAS)),
    routers.ExpertChoice(),
    routers.ExpertChoice(k=1, capacity_factor=0.5, group_size=2),
    routers.SoftSlots(slots=3),
    routers.Hash(k=2),
    routers.Hash(k=2, by="position"),
    routers.Hash(k=2, by="word"),
    routers.FrozenCopy(),
    *(routers.Folded(router=one) for one in (routers.NoisyTopK(), routers.TopP(), routers.Hash())),
    routers.FrozenCopy(router=routers.NoisyTopK(**ORDERED)),
    routers.Told(),
    *(routers.TeacherRouted(inference=who) for who in ("teacher", "student")),
    *(
        routers.Eigenbasis(context=context, selection=selection)
        for context in ("tokens", "attention_output", "learned")
        for selection in ("prune", "literal")
    ),
]
BALANCES = [part() for part in part_classes_by_kind(Balance).values()]
EXPERTS = [
    *(experts.Mlp(activation=name) for name in ("gelu", "quick_gelu", "linear", "swiglu")),
    experts.Mlp(activation="relu", number=3, dropout=0.3),
    experts.Mlp(fine=2, shared=1, zero_computation={}),
    *(experts.Eigen(factored_output=factored) for factored in (False, True)),
]
REGULARIZERS = [
    *(
        part(weight=0.1) if part.model_fields["weight"].is_required() else part()
        for part in part_classes_by_kind(regularizers.Regularizer).values()
    ),
    regularizers.SwitchBalance(level="sequence", count_from="probs"),
    regularizers.SwitchBalance(level="group", group_size=3),
    regularizers.GroupSparsity(reduction="authors", padding="circular"),
]
OBJECTIVES = ("task", "cross_entropy", "dlr", "balance", "routing_change", "routing_margin")
TRIED = (Fgsm(), Pgd(steps=3), Pgd(steps=3, form="strong"), Apgd(steps=5))
ATTACKS = [one.model_copy(update={"objective": aim}) for one in TRIED for aim in OBJECTIVES]
ATTACKS += [Autoattack(steps=2, queries=5), Fab(steps=3), Square(queries=5), Surrogate(steps=3)]
TEXT = {"channels": 4, "size": (4,), "mean": (0.0,) * 4, "std": (1.0,) * 4}
CAPTIONS = {"words": 9, "context": 4, "captions": 2, "end": 2, "vocabulary": "0" * 64}
STAGED = {"patch": 1, "width": 16, "depths": (2, 2), "heads": (2, 4)}
VOLUME = IMAGE.model_copy(update={"size": (8, 12, 4)})
AGED = VOLUME.model_copy(update={"task": parse_card_task({"kind": "regression", "target": "age"})})
VIT = backbones.Vit(patch=4, width=16, depth=2, heads=2)
CUBES = backbones.Vit3d(patch=4, width=24, depth=2, heads=2)
BACKBONES = [
    *((VIT.model_copy(update={"pooling": name}), IMAGE) for name in ("mean", "class+distillation")),
    *(
        (CUBES.model_copy(update=changes), VOLUME)
        for changes in ({"stem": "pooled", "pool": 2}, {"stem": "conv", "positions": "sinusoidal"})
    ),
    (backbones.Sfcn(channels=(4, 8, 8), head="number"), VOLUME),
    (backbones.Sfcn(channels=(4, 8, 8)), AGED),
    *((kind(**STAGED, window=4), IMAGE) for kind in (backbones.Swin, backbones.SwinV2)),
    (backbones.SwinMoe(**STAGED, window=3), IMAGE),
    (backbones.SingleLayer(hidden=5), IMAGE),
    *(
        (
            backbones.LanguageModel(width=8, depth=2, heads=2, span=4, layers=layers),
            ImageSpec(**TEXT, task=parse_card_task({"kind": "next_token", "words": 11})),
        )
        for layers in ("smoe", "momentum", "adam")
    ),
    (
        backbones.TwoTowers(image=VIT, text=TextTowerSettings(width=16, depth=1, heads=2)),
        IMAGE.model_copy(update={"task": parse_card_task({"kind": "image_text", **CAPTIONS})}),
    ),
]
# Their subject is not in the small model and data; it is time; they have no defaults
ELSEWHERE = "cohort_checks cost retrieval robustness truth word_swaps zero_shot".split()
MEASUREMENTS = [own for name, own in builtin_measurements().items() if name not in ELSEWHERE]


AMONG_EMPTY = (  # routers of experts without a network
    routers.NoisyTopK(score="sigmoid", renormalise=True, balance=BIAS),
    routers.NoisyTopK(**CAPACITY, group_size=2),
    *(routers.TopKSoftmax(), routers.TopP(), routers.Relu(), routers.Hash(by="position")),
    *(routers.Eigenbasis(), routers.Depth(share=0.5)),
)
CASES = [
    *((testing.check_router, router) for router in ROUTERS),
    *(
        (
            testing.check_router,
            routers.NoisyTopK(),
            experts.Mlp(number=4, hidden_ratio=1.5, shared=1, **own),
        )
        for own in ({}, {"activation": "swiglu"}, {"fine": 2}, {"zero_computation": {"copies": 2}})
    ),
    *(
        (testing.check_router, router, experts.Mlp(number=3, zero_computation={}))
        for router in AMONG_EMPTY
    ),
    *(
        (
            testing.check_router,
            routers.Eigenbasis(context=context),
            experts.Eigen(number=4, factored_output=factored),
        )
        for context in ("tokens", "attention_output", "learned")
        for factored in (False, True)
    ),
    *((testing.check_balance, balance) for balance in BALANCES),
    *((testing.check_experts, part) for part in EXPERTS),
    *((testing.check_regularizer, regularizer) for regularizer in REGULARIZERS),
    *((testing.check_attack, attack) for attack in [*ATTACKS, Pgd(steps=3, inside=True)]),
    *((testing.check_backbone, *backbone) for backbone in BACKBONES),
    *((testing.check_calibrator, part) for part in part_classes_by_kind(Calibrator).values()),
    *((testing.check_measurement, measurement) for measurement in MEASUREMENTS),
    (
        testing.check_teacher,
        Dense(model=VIT, training=Training(epochs=1, batch=8, learning_rate=0.1)),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__} {case[1:]}")
def test_our_part_keeps_its_promises(case):
    check, *parts = case
    check(*parts)


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        *((routers.Router, ROUTERS), (experts.Experts, EXPERTS)),
        *((regularizers.Regularizer, REGULARIZERS), (Attack, ATTACKS)),
        (backbones.Backbone, [backbone for backbone, _ in BACKBONES]),
    ],
)
def test_no_part_is_left_out(family, parts):
    assert sorted({part.kind for part in parts}) == builtin_kinds(family)


class Sound(NoisyTopKRouter):
    """Breaks nothing; others change one of its methods. More mutations: test_laws.py."""

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


def look_ahead(self, tokens):
    return Sound.scores(self, tokens.roll(-1, dims=1))


@pytest.mark.parametrize(
    ("methods", "promise"),
    [
        ({"forward": round_logits}, "under bf16 autocast"),
        ({"scores": look_ahead}, "a later token"),
        ({"decide": scale_probs}, "probs of a token sum to 1"),
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


class Brightness(Measurement):
    metrics: ClassVar = {"light": Metric("Light")}
    noisy: bool = False
    calls: list[int] = []

    def measure(self, subject, out):
        self.calls.append(1)
        if self.noisy:
            torch.rand(1)
        out.put("light", len(self.calls) + out.parts("mean", lambda: 0.5))


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


class Misdeclared(Measurement):
    metrics: ClassVar = {"light": Metric("Light", "higher")}
    put_name: str | list = "light"

    def measure(self, subject, out):
        out.put(self.put_name, 0.5)


class Praised(Misdeclared):
    metrics: ClassVar = {"light": Metric("Light", "high")}


class Placed(Misdeclared):
    metrics: ClassVar = {"light": Metric("Light", over="shift")}
    at: tuple[str, ...] = ("shift",)

    def measure(self, subject, out):
        for place in self.at:
            out.put("light", 0.5, **{place: 3} if place else {})


class Crossed(Placed):
    page: ClassVar = OnPage("light", charts=(Chart("light", "angle", "Light", "Shift", "Light"),))


class Charted(Misdeclared):
    page: ClassVar = OnPage("light", charts=(Chart("lihgt", "shift", "Light", "Shift", "Light"),))


class Listed(Mlp):
    def build(self, width):
        module = super().build(width)
        module.scale = torch.nn.Parameter(torch.ones(width))
        return module


class Unbuilt(NoisyTopK):
    def build(self, width, experts, basis=None):
        return {}["no module"]


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
        ("measurement", Misdeclared(put_name="lihgt"), "declared: 'lihgt' is none of light"),
        ("measurement", Praised(), "better of light is one of '', 'higher', 'lower', 'score'"),
        ("measurement", Charted(), "declared: 'lihgt' is none of light"),
        ("measurement", Placed(at=("shift", "shfit")), r"'shfit', did you mean \['shift'\]\?$"),
        ("measurement", Placed(at=("", "angle")), "light is put at shift, as `over` says"),
        ("measurement", Crossed(), "light, which a chart shows over 'angle', is put at that place"),
        ("experts", Listed(number=3), r"scale has a row per expert, \(E, …\)"),
        ("router", Unbuilt(), r"KeyError: 'no module' \(.*test_own_parts.py:\d+\)$"),
        ("measurement", Misdeclared(put_name=[]), "ValidationError: 1 validation error for Value"),
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
