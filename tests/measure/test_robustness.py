import numpy as np
import pytest
import torch

from moecore import UserError, predict_in_batches
from moecore.core.streams import derived_seed
from moecore.measure import attack_audit, base
from moecore.measure import robustness as module
from moecore.measure.robustness import Robustness, check_attack_settings, target_on_drawn_images
from moecore.measure.values import Found, Value
from moecore.run.measurement_run import find_transferred_images
from moecore.stages import robustness as stage
from moecore.stages import transferred
from tests.attacks.models import CLASSES, SETS, YEARS
from tests.measure.subjects import MODELS, compute_without_cache, in_run

FGSM, PGD, APGD = {"kind": "fgsm"}, {"kind": "pgd", "steps": 4}, {"kind": "apgd", "steps": 8}
BALANCE, CHANGE = {"objective": "balance", "group": 10}, {"objective": "routing_change"}
ATTACKS = (FGSM, PGD, PGD | BALANCE, PGD | CHANGE, APGD, APGD | {"objective": "dlr"})
SETTINGS = Robustness(
    images=25, epsilons=(0.2, 0.05), batch=10, audit={"images": 12, "steps": 4}, attacks=ATTACKS
)
INSIDE, SHORT = {"inside": True}, PGD | {"steps": 2}
ATTACKS_ON_AGES = (FGSM | INSIDE, PGD | INSIDE, PGD, APGD | {"steps": 4})
ATTACKS_ON_AGES += (SHORT | BALANCE | {"group": 5}, SHORT | CHANGE)
AUDIT = {"images": 6, "steps": 3}
ON_AGES = Robustness(images=10, epsilons=(0.1, 0.02), batch=4, audit=AUDIT, attacks=ATTACKS_ON_AGES)
NAMES = ["fgsm", "pgd-4", "pgd-balance-10-4", "pgd-routing_change-4", "apgd-8", "apgd-dlr-8"]
ROWS = len(NAMES) * 3
MEAN = "2 epsilons"
IDLE = "the model has no MoE layer whose routing could change"
RESULT = "artifacts/measured/robustness/pretrain/vit/0.json"


@pytest.fixture(scope="module")
def results(run) -> dict[str, Found]:
    return {
        name: SETTINGS.collect_result(subject, compute_without_cache)
        for name, subject in run[1].items()
    }


def curves_of(found: Found, metric: str = "attacked") -> dict[str, list[Value]]:
    curves: dict[str, list[Value]] = {}
    for value in found.all(metric):
        curves.setdefault(str(value.at["attack"]), []).append(value)
    return curves


def test_a_few_images_are_shown_under_the_strongest_attack(results, run):
    for name, found in results.items():
        shown = attack_audit.StrongestAttackGallery.model_validate(found.facts["attacked"])
        last = {one: values[-1].value for one, values in curves_of(found).items()}
        assert last[shown.attack] == min(last.values())
        assert [row.epsilon for row in shown.rows] == [0, 0.05, 0.2]
        clean, *moved = (row.pictures.array().astype(float) / 255 for row in shown.rows)
        images = target_on_drawn_images(run[1][name], SETTINGS).images
        assert np.array_equal(clean * 255, images[[0, 12, 24]])
        for pictures, epsilon in zip(moved, (0.05, 0.2), strict=True):
            assert 0 < np.abs(pictures - clean).max() <= epsilon + 1 / 255


@pytest.mark.parametrize("name", list(MODELS))
def test_every_attack_has_its_curve(results, name):
    found = results[name]
    curves = curves_of(found)
    met = NAMES if name == "vit" else [one for one in NAMES if "routing_change" not in one]
    clean = found.find("clean").value
    assert found.facts["images"] == 25 and list(curves) == met and 0.3 < clean <= 1
    for attack, values in curves.items():
        assert [value.at["epsilon"] for value in values] == [0, 0.05, 0.2]
        assert values[0].value == clean
        assert found.find("unchanged_images", attack=attack, epsilon=0.0).value == 1
        for value in values:
            assert value.value == int(value.item_values.sum()) / 25 and set(value.item_values) <= {
                0,
                1,
            }
            assert value.low <= value.value <= min(value.high, clean)
            assert found.find("loss", **value.at).value > 0
        again, mean = (found.find("attacked_at", attack=attack, epsilon=at) for at in (0.05, MEAN))
        assert np.array_equal(again.item_values, values[1].item_values)
        assert mean.value == pytest.approx((values[1].value + values[2].value) / 2)
        assert np.array_equal(mean.item_values, (values[1].item_values + values[2].item_values) / 2)
    changes = 3 * 6 * 2 if name == "vit" else 0
    assert len(found.all("routing_change_layer")) == changes
    assert len(found.all("processing_change_layer")) == changes
    assert curves["pgd-4"][-1].value < clean


def test_the_worst_case_is_over_all_attacks(results):
    found = results["vit"]
    rows = zip(found.all("worst"), (0, 0.05, 0.2), strict=True)
    for index, (worst, epsilon) in enumerate(rows):
        hits = np.array([values[index].item_values for values in curves_of(found).values()])
        assert np.array_equal(worst.item_values, hits.all(axis=0))
        assert worst.at == {"epsilon": epsilon} and worst.low <= worst.value <= worst.high


def test_routing_change_is_nothing_when_clean_and_most_where_it_is_the_aim(results):
    for change in ("processing_change", "routing_change"):
        curves = curves_of(results["vit"], change)
        assert all(values[0].value == 0 for values in curves.values())
        for value in (value for values in curves.values() for value in values):
            assert value.value == pytest.approx(np.mean(value.item_values))
    moved = {name: values[-1].value for name, values in curves.items()}
    assert moved["pgd-routing_change-4"] > moved["pgd-4"] > 0


def test_what_needs_routing_is_skipped_for_a_dense_model_and_nothing_else(results):
    assert results["dense"].skipped == (f"pgd-routing_change-4: {IDLE}",)
    assert results["vit"].skipped == ()
    losses = curves_of(results["dense"], "loss")
    balanced = losses["pgd-balance-10-4"][1].value
    assert balanced == pytest.approx(losses["pgd-4"][1].value, rel=1e-4)
    sparse, dense = ({line["name"]: line for line in results[key].facts["audit"]} for key in MODELS)
    assert list(sparse) == list(dense) and len(sparse) == 10
    assert sparse["deterministic"]["holds"] is True
    assert [name for name, line in sparse.items() if line["holds"] is None] == []
    assert [name for name, line in dense.items() if line["holds"] is None] == ["surrogate"]
    assert "no MoE layer" in dense["surrogate"]["text"]


def test_the_batch_and_survivors_alone_leave_the_scores(run, results):
    """With survivors alone no routing is measured."""
    settings = SETTINGS.model_copy(update={"batch": 7, "survivors": True})
    found = settings.collect_result(run[1]["vit"], compute_without_cache)
    for metric in ("attacked", "worst"):
        assert found.all(metric) == results["vit"].all(metric)
    assert found.find("clean").value < 1
    assert not [value for value in found.values if "_change" in value.metric]


def test_an_attack_with_its_own_radius_is_left_out_of_the_worst_case(run, results):
    own = {"kind": "autoattack", "eps": 1.5, "norm": "l2", "steps": 5, "queries": 20}
    sizes = {"images": 25, "epsilons": (0.2, 0.05), "audit": SETTINGS.audit}
    settings = Robustness(**sizes, attacks=(FGSM, own))
    found = settings.collect_result(run[1]["vit"], compute_without_cache)
    values = curves_of(found)["autoattack-1.5-l2-5-20"]
    assert [value.at["epsilon"] for value in values] == [0, 1.5]
    assert settings.pieces == 3 + 2 + 1 and 1.5 in settings.places()["epsilon"]
    assert values[1].value < values[0].value
    for value in curves_of(found)["fgsm"]:
        assert found.find("worst", epsilon=value.at["epsilon"]).value == value.value


def test_what_makes_no_sense_for_the_labels_is_refused():
    pgd, dlr = {"kind": "pgd"}, {"kind": "pgd", "objective": "dlr"}
    settings = lambda *attacks, **changes: Robustness(epsilons=(0.1,), attacks=attacks, **changes)
    check_attack_settings(settings(pgd, dlr, survivors=True), CLASSES)
    check_attack_settings(settings(pgd, survivors=True), SETS)
    for task in (YEARS, SETS):
        with pytest.raises(UserError, match=r"attacks\[1\]: pgd with objective dlr needs"):
            check_attack_settings(settings(pgd, dlr), task)
    with pytest.raises(UserError, match="survivors: found true"):
        check_attack_settings(settings(pgd, survivors=True), YEARS)


def run_stage(run, patch, **changes) -> Found:
    settings = SETTINGS.model_dump(mode="json") | changes
    in_run(patch, run[0], robustness=settings)
    stage.robustness("pretrain", "vit", 0)
    return base.read_result(run[0] / RESULT, Found, "robustness")


def test_a_killed_stage_attacks_only_what_is_left(run, results, monkeypatch):
    """Stopped at the fifth row, it attacks 21 − 4 rows; with other settings all of them."""
    rows = []
    row_of = module.measure_attack_at_epsilon

    def stopped(attack, target, clean, epsilon):
        rows.append(epsilon)
        if len(rows) == 5:
            raise KeyboardInterrupt
        return row_of(attack, target, clean, epsilon)

    monkeypatch.setattr(module, "measure_attack_at_epsilon", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_stage(run, monkeypatch)
    assert run_stage(run, monkeypatch) == results["vit"]
    assert len(rows) == 5 + ROWS - 4
    run_stage(run, monkeypatch, batch=7)
    assert len(rows) == 5 + ROWS - 4 + ROWS


def test_attacks_on_routers_are_reported_each_and_by_their_worst(run):
    routers = {"steps": 3, "temperatures": [0.3], "weights": [1.0]}
    changes = {"images": 20, "epsilons": (0.05,), "attacks": [{"kind": "fgsm"}], "routers": routers}
    changes |= {"audit": {"images": 2, "steps": 1}}
    settings = Robustness.model_validate(SETTINGS.model_dump() | changes)
    found = settings.collect_result(run[1]["vit"], compute_without_cache)
    target = target_on_drawn_images(run[1]["vit"], settings)
    clean = target.scores(target.images)
    reported = {value.at["part"]: value for value in found.all("part") if value.at["epsilon"]}
    each = []
    for attack in settings.routers.parts:
        each.append(clean & target.scores(target.attacked(attack, 0.05)))
        assert reported[attack.name].value == float(each[-1].double().mean())
    worst = torch.stack(each).all(dim=0).double().numpy()
    curves = curves_of(found)
    assert np.array_equal(curves["router_attacks"][-1].item_values, worst)
    assert np.array_equal(
        found.all("worst")[-1].item_values, worst * curves["fgsm"][-1].item_values
    )
    assert settings.pieces == 5 * 2 + 1 and settings.places()["attack"] == list(curves)
    dense = settings.collect_result(run[1]["dense"], compute_without_cache)
    assert dense.skipped == (f"router_attacks: {IDLE}",) and not dense.all("part")


def test_images_attacked_on_another_model_are_scored_too(run, monkeypatch):
    changes = {"transfer": {"kind": "pgd", "steps": 3}, "epsilons": [0.1]}
    changes |= {"attacks": [{"kind": "fgsm"}], "audit": {"images": 4, "steps": 1}}
    settings = SETTINGS.model_dump(mode="json") | changes
    in_run(monkeypatch, run[0], robustness=settings)
    transferred.transferred("pretrain", "dense", 0)
    found = run_stage(run, monkeypatch, **changes)
    settings = Robustness.model_validate(settings)
    source, target = (target_on_drawn_images(run[1][name], settings) for name in ("dense", "vit"))
    scores = target.worse_scores(source.attacked(settings.transfer, 0.1)).double().numpy()
    curves = curves_of(found)
    assert np.array_equal(curves["transfer-dense"][-1].item_values, scores)
    assert scores.sum() < found.find("clean").item_values.sum()
    assert np.array_equal(
        found.all("worst")[-1].item_values, scores * curves["fgsm"][-1].item_values
    )
    assert found.skipped == ("transfer-seed: the stage transferred attacked no such model",)
    assert "and 1 listed black boxes" in str(found.facts["audit"])


def test_images_come_from_the_dense_model_and_the_next_seed(tmp_path):
    for item in ("dense/0", "vmoe/0", "vmoe/2", "vmoe/10", "tgr/0"):
        (tmp_path / item).mkdir(parents=True)
    expected = {"transfer-dense": tmp_path / "dense/0", "transfer-seed": tmp_path / "vmoe/2"}
    assert find_transferred_images(tmp_path, "vmoe", 0) == expected
    assert find_transferred_images(tmp_path, "vmoe", 10) == {"transfer-seed": tmp_path / "vmoe/0"}
    assert find_transferred_images(tmp_path, "tgr", 0) == {"transfer-dense": tmp_path / "dense/0"}
    assert find_transferred_images(tmp_path, "dense", 0) == {}


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_errors_under_attack(aged, name):
    found = ON_AGES.collect_result(aged[name], compute_without_cache)
    clean, curves = found.find("clean").value, curves_of(found)
    drawn = np.random.default_rng(derived_seed("attacked_images", 0))
    where, test = np.sort(drawn.permutation(40)[:10]), aged[name].data.test
    said, _ = predict_in_batches(aged[name].model, test.images[where], 5)
    errors = np.abs(said[:, 0].numpy() - test.labels[where])
    assert curves["fgsm-inside"][0].item_values == pytest.approx(errors, abs=1e-4)
    for values in curves.values():
        assert [value.at["epsilon"] for value in values] == [0, 0.02, 0.1]
        assert values[0].value == pytest.approx(clean)
        for value in values:
            assert value.low <= value.value <= value.high
            assert (
                value.value == pytest.approx(np.mean(value.item_values))
                and len(value.item_values) == 10
            )
            assert (value.item_values >= values[0].item_values).all(), (
                "the clean image lies in every ball"
            )
            assert found.find("loss", **value.at).value <= value.value + 1e-9
    layers = {value.at["layer"] for value in found.all("routing_change_layer")}
    assert layers == ({1, 2} if name == "moe" else set())
    plain = curves["pgd-4"][-1].value
    inside = curves["pgd-inside-4"][-1].value
    assert plain > inside > clean + 0.1, "the background is of use to an attack"
    errors = np.array([[value.item_values for value in values] for values in curves.values()])
    for worst, left in zip(found.all("worst"), errors.max(axis=0), strict=True):
        assert np.array_equal(worst.item_values, left)
    assert len(found.skipped) == (0 if name == "moe" else 1)
