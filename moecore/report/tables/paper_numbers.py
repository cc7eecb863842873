"""What the papers themselves report, in the units of our metrics (shares from 0 to 1).

Each with the table that it stands in. Their data, models and sizes are others than ours, so these
numbers are shown beside ours and never compared with them.
"""

from statistics import fmean
from typing import NamedTuple


class Reported(NamedTuple):
    """One model of one paper. ``values``: name of our metric → the paper's number."""

    paper: str
    model: str
    source: str
    values: dict[str, float]


PAPERS = {
    "prc": "PRC: pairwise router consistency",
    "ermoe": "ERMoE: eigen-reparameterized mixture of experts",
    "tgr": "TGR: teacher-guided routing",
    "moge": "MoGE: mixture of group experts",
    "adversarial": "On the adversarial robustness of mixture of experts",
    "corruptions": "Common corruptions",
    "cost": "Cost of a trained model (ERMoE, tables S2, S4, §12; MoGE, table 6)",
    "ages": "ERMoE-ba: age from brain scans (supplement §5, table S1)",
}  # in the order of the tables
SHORT = {
    "prc": "PRC",
    "ermoe": "ERMoE",
    "tgr": "TGR",
    "moge": "MoGE",
    "adversarial": "Adversarial",
    "corruptions": "Corruptions",
    "cost": "Cost",
    "ages": "Brain age",
}

NOTES = {
    "tgr": "The paper's text (§5.1): halfway through training V-MoE differs from its final model "
    "for roughly 40 % of the inputs; TGR agrees for over 70 % within 50 of 300 epochs. Between "
    "consecutive epochs TGR agrees for about 80 %, V-MoE often for 50 to 60 %.",
    "ermoe": "The supplement's text: over the threshold T the fallback stays near zero below 0.5 "
    "and rises sharply from there (figure S3); over k accuracy is best at 2, and tail mass and "
    "time grow with k (figure S5).",
    "ages": "ADNI holds scans of people; errors on other data, simulated ones above all, cannot "
    "be compared with the paper's in height.",
    "adversarial": "The paper's text (§4.6): the routing change in layer 1 is at most near 0.2 "
    "under PGD and around 0.5 under AutoPGD; at ε = 0.001 the false discovery rate of ViT-B/32 is "
    "0.744 under PGD and 0.757 under AutoPGD.",
}

_PRC = "tables 2, 4, 5: ImageNet-1K, fine-tuned, k = 2; the sixth MoE layer"
_ERMOE = "table S3: CIFAR-10, 5-shot"
_MOGE = "§2.4 and table 1: Fashion-MNIST, 400 experts, top-1"
_LAYERS = "tables 7, S9: ImageNet-1K, the layers 8, 10 and 12 and their mean"
_KEPT = "§5.1: ImageNet-1K → CIFAR-100"
_ADVERSARIAL = "§4.2: ImageNet, without attack; fine-tuned after JFT-300M"
_PGD_TRAINED = "§4.2: ImageNet, without attack; fine-tuned with PGD training"
_JFT = "§4.2: precision at 1 on JFT-300M, without attack"
_SWEEP = "appendix B: ImageNet, without attack; FLOPs of an image"
_SPEED = "tables S2, S4: ViT-B/16, 8 experts"
_STRESS = "§12: one layer, allocated GPU memory of an epoch"
_WHOLE = "table 6: Tiny-ImageNet, 32 experts, all GPU memory"
_TRAINED = "table S9: ImageNet-1K, two experts a token"
_ABOUT = "§3.3: approximately, ImageNet-1K"
_ADNI = "table S1: ADNI, test split"
_TOP5 = "table 2: V-MoE-S, 32 experts, top-1"
_TRANSFORMS = (
    "rotation_5",
    "rotation_10",
    "rotation_15",
    "scaling_0_5",
    "scaling_0_8",
    "scaling_1_1",
    "translation_0_0_1",
    "translation_0_1_0",
    "translation_0_1_0_1",
    "shear_5",
    "shear_10",
    "shear_15",
)
_MOE_IMED = (
    0.0778,
    0.1301,
    0.1670,
    0.2359,
    0.2268,
    0.1466,
    0.1181,
    0.1218,
    0.1759,
    0.0345,
    0.0671,
    0.0980,
)
_MOGE_IMED = (
    0.0473,
    0.0811,
    0.1067,
    0.1948,
    0.1680,
    0.1147,
    0.0786,
    0.0809,
    0.1206,
    0.0209,
    0.0396,
    0.0576,
)


def _prc(
    accuracy: float, matches: tuple[float, float, float], sure: tuple[float, float, float]
) -> dict[str, float]:
    names = (
        "match_top1",
        "match_top2_ordered",
        "match_top2_sets",
        "confidence_highest",
        "confidence_second",
        "confidence_others",
    )
    return {"test_accuracy": accuracy, **dict(zip(names, (*matches, *sure), strict=True))}


def _ermoe(accuracy: float, cv2: float, fallback: float) -> dict[str, float]:
    return {"test_accuracy": accuracy, "load_cv2": cv2, "fallback": fallback}


def _agreements(layers: tuple[float, ...]) -> dict[str, float]:
    by_layer = {f"teacher_agreement_layer_{place}": one for place, one in enumerate(layers, 1)}
    return {"teacher_agreement": fmean(layers), **by_layer}


def _tgr(entropies: tuple[float, ...], agreements: tuple[float, ...]) -> dict[str, float]:
    return {"entropy": fmean(entropies), **_agreements(agreements)}


def _moge(accuracy: float, distances: tuple[float, ...]) -> dict[str, float]:
    return {
        "test_accuracy": accuracy,
        "imed": fmean(distances),
        **{f"imed_{n}": d for n, d in zip(_TRANSFORMS, distances, strict=True)},
    }


def _top5(accuracy: float, among_five: float) -> dict[str, float]:
    return {"test_accuracy": accuracy, "test_accuracy_top5": among_five}


def _cost(numbers: tuple[float, ...], accuracy: float | None = None) -> dict[str, float]:
    """Millions of parameters and of active ones, GFLOPs, latency in ms, routing's GFLOPs and ms."""
    names = (
        "parameters",
        "active_parameters",
        "gflops",
        "latency_ms",
        "routing_gflops",
        "routing_ms",
    )
    values = dict(zip(names, (1e6 * numbers[0], 1e6 * numbers[1], *numbers[2:]), strict=False))
    return values if accuracy is None else {"test_accuracy": accuracy, **values}


REPORTED = (
    Reported(
        "prc", "V-MoE-S", _PRC, _prc(0.7584, (0.6304, 0.3477, 0.4544), (0.7586, 0.1493, 0.0921))
    ),
    Reported("prc", "PRC", _PRC, _prc(0.7627, (0.7578, 0.4854, 0.5896), (0.8788, 0.0915, 0.0297))),
    Reported("ermoe", "ERMoE", _ERMOE, _ermoe(0.9605, 0.08, 0.002)),
    Reported("ermoe", "ERMoE, plain weights", _ERMOE, _ermoe(0.9412, 0.10, 0.003)),
    Reported("ermoe", "ERMoE, learned-logit router", _ERMOE, _ermoe(0.9107, 0.32, 0.024)),
    Reported("ermoe", "ERMoE, λ = 0", _ERMOE, _ermoe(0.9535, 0.15, 0.007)),
    Reported("tgr", "V-MoE", _KEPT, {"agreement_before_after": 0.5056}),
    Reported("tgr", "TGR-MoE", _KEPT, {"agreement_before_after": 0.7375}),
    Reported("tgr", "V-MoE-Ti", _LAYERS, {"entropy": fmean((0.9098, 0.7776, 0.9489))}),
    Reported(
        "tgr", "TGR-MoE-Ti", _LAYERS, _tgr((0.9701, 0.9627, 0.9420), (0.7481, 0.7060, 0.5343))
    ),
    Reported("tgr", "V-MoE-S", _LAYERS, {"entropy": fmean((0.9924, 0.9848, 0.9938))}),
    Reported("tgr", "TGR-MoE-S", _LAYERS, _tgr((0.9772, 0.9708, 0.9878), (0.8001, 0.7549, 0.5987))),
    Reported("tgr", "V-MoE-B", _LAYERS, {"entropy": fmean((0.9677, 0.9906, 0.9888))}),
    Reported("tgr", "TGR-MoE-B", _LAYERS, _agreements((0.8127, 0.7706, 0.6715))),
    Reported("moge", "MoE", _MOGE, _moge(0.4170, _MOE_IMED)),
    Reported("moge", "MoGE", _MOGE, _moge(0.4474, _MOGE_IMED)),
    Reported("moge", "V-MoE, CIFAR-100", _TOP5, _top5(0.7403, 0.9149)),
    Reported("moge", "V-MoGE, CIFAR-100", _TOP5, _top5(0.7467, 0.9155)),
    Reported("moge", "V-MoE, Tiny-ImageNet", _TOP5, _top5(0.5538, 0.7666)),
    Reported("moge", "V-MoGE, Tiny-ImageNet", _TOP5, _top5(0.5615, 0.7724)),
    Reported("moge", "V-MoE, ImageNet-1K", _TOP5, _top5(0.7695, 0.9295)),
    Reported("moge", "V-MoGE, ImageNet-1K", _TOP5, _top5(0.7724, 0.9318)),
    Reported("moge", "V-MoE, fine-tuned", _TOP5, _top5(0.8119, 0.9607)),
    Reported("moge", "V-MoGE, fine-tuned", _TOP5, _top5(0.8150, 0.9619)),
    Reported("adversarial", "ViT-B/32", _ADVERSARIAL, {"test_accuracy": 1 - 0.193}),
    Reported("adversarial", "V-MoE-B/32", _ADVERSARIAL, {"test_accuracy": 1 - 0.178}),
    Reported("adversarial", "ViT-B/32, PGD training", _PGD_TRAINED, {"test_accuracy": 1 - 0.517}),
    Reported("adversarial", "V-MoE-B/32, PGD training", _PGD_TRAINED, {"test_accuracy": 1 - 0.498}),
    Reported("adversarial", "ViT-B/32, JFT-300M", _JFT, {"test_accuracy": 1 - 0.607}),
    Reported("adversarial", "V-MoE-B/32, JFT-300M", _JFT, {"test_accuracy": 1 - 0.565}),
    Reported(
        "ages",
        "ERMoE-ba",
        _ADNI,
        {
            "test_mae": 2.307,
            "mae_pooled": 2.287,
            "mae_sex_specific": 2.295,
            "corr_raw": -0.287,
            "corr_pooled": -0.125,
            "corr_sex_specific": -0.126,
        },
    ),
    Reported("cost", "V-MoE", _SPEED, _cost((284.9, 129.9, 26.3, 4.4, 0.631, 0.03))),
    Reported("cost", "ERMoE", _SPEED, _cost((243.0, 113.2, 23.6, 4.1, 1.169, 0.05))),
    Reported("cost", "MoE, one layer, 8 experts", _STRESS, {"training_memory_mb": 18_000}),
    Reported("cost", "MoE, one layer, 32 experts", _STRESS, {"training_memory_mb": 80_000}),
    Reported("cost", "ERMoE, one layer, 8 experts", _STRESS, {"training_memory_mb": 20_500}),
    Reported("cost", "ERMoE, one layer, 32 experts", _STRESS, {"training_memory_mb": 84_700}),
    Reported("cost", "V-MoE-S, Tiny-ImageNet", _WHOLE, {"training_memory_mb": 5295}),
    Reported("cost", "V-MoGE-S, Tiny-ImageNet", _WHOLE, {"training_memory_mb": 5299}),
    Reported("cost", "V-MoE-B, Tiny-ImageNet", _WHOLE, {"training_memory_mb": 12_071}),
    Reported("cost", "V-MoGE-B, Tiny-ImageNet", _WHOLE, {"training_memory_mb": 12_074}),
    Reported("cost", "V-MoE-Ti", _TRAINED, {"parameters": 19.23e6}),
    Reported("cost", "TGR-MoE-Ti", _TRAINED, {"parameters": 19.25e6}),
    Reported("cost", "V-MoE-S", _TRAINED, {"parameters": 47.26e6}),
    Reported("cost", "TGR-MoE-S", _TRAINED, {"parameters": 47.28e6}),
    Reported("cost", "V-MoE-B", _TRAINED, {"parameters": 186.53e6}),
    Reported("cost", "TGR-MoE-B", _TRAINED, {"parameters": 186.55e6}),
    Reported("cost", "SwinV1-MoE-B, 128 experts", _ABOUT, {"parameters": 1.4e9}),
    Reported("cost", "ViT-B/32", _SWEEP, _cost((102.1, 102.1, 8.9), 1 - 0.193)),
    Reported("cost", "ViT-B++/32", _SWEEP, _cost((193.6, 193.6, 17.9), 1 - 0.172)),
    Reported("cost", "V-MoE-B/32, 2 experts", _SWEEP, _cost((130.5, 130.5, 12.1), 1 - 0.189)),
    Reported("cost", "V-MoE-B/32, 4 experts", _SWEEP, _cost((187.1, 130.5, 12.2), 1 - 0.187)),
    Reported("cost", "V-MoE-B/32, 8 experts", _SWEEP, _cost((300.5, 130.5, 12.2), 1 - 0.180)),
    Reported("cost", "V-MoE-B/32, 16 experts", _SWEEP, _cost((527.2, 130.5, 12.3), 1 - 0.178)),
    Reported("cost", "V-MoE-B/32, 32 experts", _SWEEP, _cost((980.6, 130.6, 12.4), 1 - 0.178)),
)


def reported(paper: str, shown: frozenset[str]) -> list[Reported]:
    """The models of one paper that have a number in one of the ``shown`` columns."""
    return [model for model in REPORTED if model.paper == paper and model.values.keys() & shown]
