"""What is marked, and by which test: a difference that does not stand is not marked."""

import numpy as np
import pytest
import torch

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.measure.base import Estimate
from moecore.measure.robustness import Result as Robustness
from moecore.report.column import Column, Metric
from moecore.report.measured import Measured, measured
from moecore.report.page import page
from moecore.report.references import baseline, references
from moecore.report.significance import against, leader, possible_test
from moecore.report.tables import column, flat, table, used_tests
from tests.report.generated import TASK, changed, trained
from tests.report.test_report import results


class Found(Config):
    """A number, and which images are right."""

    value: float | None = 0.0
    hits: tuple[bool, ...] | None = None


def model(hits=None, value: float | None = 0.0) -> Measured:
    """A model whose number is ``value`` and whose hits are ``hits``."""
    return measured(Found(value=value, hits=None if hits is None else tuple(hits.tolist())))


def sized(parameters: int = 10) -> Measured:
    """A trained model with these parameters, of which a token uses ten."""
    sizes = {"parameters": parameters, "active_parameters": 10}
    return measured(trained(0, 0, False, "pretrain").model_copy(update=sizes))


def right(*wrong: int, count: int = 100) -> np.ndarray:
    """Hits of all images but those."""
    found = np.ones(count, dtype=bool)
    found[list(wrong)] = False
    return found


def hits_of(model: Measured) -> np.ndarray | None:
    found = model.of(Found).hits
    return None if found is None else np.array(found)


def metric(read, better, form="number", hits=None) -> Metric:
    return Metric(Column("share" if hits else "value", "", read, better, form, hits=hits), Found)


def share(found: Found) -> Estimate:
    return Estimate(value=float(np.mean(found.hits)), low=0.0, high=1.0)


def within(found: Found) -> Estimate:
    return Estimate(value=found.value, low=found.value - 0.1, high=found.value + 0.1)


SHARE = metric(share, "higher", "share", hits_of)
VALUE = metric(lambda found: found.value, "lower")
WITHIN = metric(within, "lower")
NEITHER = metric(lambda found: found.value, "")


def one_seed(**hits) -> dict[str, dict[int, Measured]]:
    return {name: {0: model(found)} for name, found in hits.items()}


def seeds(**values) -> dict[str, dict[int, Measured]]:
    return {
        name: {seed: model(value=value) for seed, value in enumerate(found)}
        for name, found in values.items()
    }


def marked(metric: Metric, models) -> list[str]:
    return [method for method, found in column(metric, models).items() if found and found.marked]


def test_one_seed_is_tested_on_the_images():
    # b alone is right on 10 images, a alone on 2: exact p = 158 / 4096
    models = one_seed(a=right(*range(10)), b=right(50, 51))
    found = against(SHARE, models, "a")["b"]
    assert (found.test, found.only, found.p, found.holm) == (
        "mcnemar",
        (10, 2),
        pytest.approx(158 / 4096),
        pytest.approx(158 / 4096),
    )
    assert (
        found.difference.value == pytest.approx(0.08)
        and 0 < found.difference.low < 0.08 < found.difference.high
    )
    assert marked(SHARE, models) == ["b"], "although the intervals 0 … 1 of both overlap"


def test_a_difference_that_does_not_stand_is_not_marked():
    assert (
        marked(SHARE, one_seed(a=right(*range(7)), b=right(50, 51))) == []
    )  # 7 and 2: p = 2 · (1 + 9 + 36) / 512 = 0.18
    assert (
        marked(SHARE, one_seed(a=right(1), b=right(1))) == []
        and marked(SHARE, one_seed(a=right(1))) == []
    )


def test_holm_takes_the_number_of_comparisons_into_account():
    # 10 against 2 has p = 0.0386, which stands alone; against two such methods 2 · 0.0386 does not
    two = one_seed(a=right(*range(10)), b=right(50, 51))
    three = two | one_seed(c=right(*range(20, 30)))
    found = against(SHARE, three, "b")
    assert [tested.holm for tested in found.values()] == pytest.approx([2 * 158 / 4096] * 2)
    assert marked(SHARE, two) == ["b"] and marked(SHARE, three) == []


def test_the_best_must_beat_each_other_method():
    weak = right(*range(20))
    assert marked(SHARE, one_seed(a=weak, b=right(50), c=weak)) == ["b"]
    assert marked(SHARE, one_seed(a=weak, b=right(50), c=right(51))) == []


def test_several_seeds_are_tested_pair_by_pair():
    # differences 0.1, 0.11, 0.09: t = 0.1 / (0.01 / √3) = 17.3; the seeds' own spread is far larger
    models = seeds(a=(0.2, 0.61, 0.89), b=(0.1, 0.5, 0.8))
    found = against(VALUE, models, "b")["a"]
    assert (
        found.test == "seeds"
        and found.difference.value == pytest.approx(0.1)
        and found.p == pytest.approx(1 - np.sqrt(300 / 302), rel=1e-6)
    )
    assert marked(VALUE, models) == ["b"], "lower is better"
    assert marked(VALUE, seeds(a=(0.2, 0.61, 0.89), b=(0.3, 0.5, 0.8))) == []


def test_without_a_paired_test_the_intervals_decide():
    assert (
        possible_test(WITHIN, [{0: model()}]) == "intervals"
        and possible_test(SHARE, [{0: model(None)}]) == "intervals"
    )
    assert (
        marked(WITHIN, seeds(a=(0.5,), b=(0.1,))) == ["b"]
        and marked(WITHIN, seeds(a=(0.25,), b=(0.1,))) == []
    )
    assert (
        against(WITHIN, seeds(a=(0.5,), b=(0.1,)), "a") == {}
        and marked(VALUE, seeds(a=(0.5,), b=(0.1,))) == []
    )


def test_where_neither_is_better_nothing_is_tested():
    models = seeds(a=(1.0, 2.0, 3.1), b=(2.0, 3.0, 4.0))
    assert marked(NEITHER, models) == [] and against(NEITHER, models, "a") == {}


def test_a_method_without_the_metric_takes_no_part():
    models = seeds(a=(0.2, 0.61, 0.89), b=(0.1, 0.5, 0.8)) | {
        "dense": {seed: model(value=None) for seed in range(3)}
    }
    found = column(VALUE, models)
    assert found["dense"] is None and found["b"].marked and not found["a"].marked


def test_different_images_or_seeds_are_an_error():
    with pytest.raises(UserError, match="100 images, another method's of 90"):
        against(SHARE, one_seed(a=right(1), b=right(1, count=90)), "b")
    models = seeds(a=(1.0, 2.0), b=(1.0, 2.0))
    models["b"] = {5: models["b"][0], 6: models["b"][1]}
    with pytest.raises(UserError, match="seeds"):
        against(VALUE, models, "a")


def test_leader_needs_a_test():
    models = seeds(a=(0.2, 0.61, 0.89), b=(0.1, 0.5, 0.8))
    assert (
        leader(VALUE, models, {"a": 0.57, "b": 0.47}) == "b"
        and leader(VALUE, {"a": models["a"]}, {"a": 0.5}) is None
    )


def test_what_methods_are_compared_with():
    plain = {0: sized()}
    routed = {0: sized(parameters=20)}
    assert baseline({"dense": plain, "prc": routed, "vmoe": routed}) == "vmoe"
    assert references({"dense": plain, "prc": routed, "tgr": routed}) == ["prc", "dense"]
    assert references({"a": plain}) == []
    assert baseline({"a": plain}) == ""


def test_compare_json_has_the_tests(tmp_path):
    one = flat(results(tmp_path / "one"))["tgr"]["pretrain"]
    for name in ("test_accuracy", "accuracy_fgsm", "accuracy_worst_case"):
        assert set(one[name]["against"]) == {"vmoe", "dense"}
        tested = one[name]["against"]["vmoe"]
        assert (
            tested["test"] == "mcnemar"
            and 0 <= tested["p"] <= tested["p_holm"] <= 1
            and tested["low"] <= tested["difference"] <= tested["high"]
        )
        assert tested["difference"] == pytest.approx(
            (tested["only_first"] - tested["only_second"])
            / (600 if name == "test_accuracy" else 200)
        )
    assert "against" not in one["ece_after"] and "against" not in one["parameters"]
    found = flat(results(tmp_path / "two", seeds=(0, 1, 2)))
    assert (
        found["tgr"]["pretrain"]["load_cv2"]["against"]["vmoe"]["test"] == "seeds"
        and found["tgr"]["pretrain"]["accuracy_fgsm"]["against"]["vmoe"]["test"] == "items × seeds"
        and "against" not in found["tgr"]["pretrain"]["parameters"]
    )
    assert (
        "vmoe" not in found["vmoe"]["pretrain"]["test_accuracy"]["against"]
        and "dense" not in found["tgr"]["pretrain"]["load_cv2"]["against"]
    )


def test_the_page_says_which_test_was_used(tmp_path):
    one = results(tmp_path / "one")
    many = results(tmp_path / "many", seeds=(0, 1, 2))
    used = {}
    for name, found in (("one", one), ("many", many)):
        phase = found.phases["pretrain"]
        used[name] = used_tests(found, phase, table(found, phase).metrics)
    assert used == {"one": {"mcnemar", "intervals"}, "many": {"items × seeds", "seeds"}}
    assert "McNemar" in page(one)
    assert "paired test over the seeds" not in page(one)
    assert "McNemar" not in page(many)
    assert "paired test over the seeds" in page(many)


def test_a_mark_is_shown(tmp_path):
    shown = results(tmp_path, {"dense": False, "vmoe": True}, phases=("pretrain",))
    before = page(shown).count('class="best"')
    phase = shown.phases["pretrain"]
    result = phase.models["vmoe"][0].of(Robustness)
    all_right = {"score": 1.0, "scores": TASK.packed(all_true(200))}
    rows = {
        name: (*found[:-1], found[-1].model_copy(update=all_right))
        for name, found in result.attacks.items()
    }
    result = result.model_copy(update={"attacks": rows})
    phase.models["vmoe"][0] = changed(phase.models["vmoe"][0], result)
    cells = table(shown, phase).cells
    assert cells["vmoe"]["accuracy_fgsm"].interval.value == 1
    assert cells["vmoe"]["accuracy_fgsm"].marked
    assert not cells["dense"]["accuracy_fgsm"].marked
    assert page(shown).count('class="best"') > before


def all_true(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.bool)
