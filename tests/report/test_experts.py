"""What the page says of experts: whether seeds find the same, what they are worth, what is lost."""

import numpy as np
import pytest

from moecore.core.files import UserError, to_jsonable, write_json
from moecore.measure.expert_worth import ExpertWorth
from moecore.measure.router_regret import RouterRegret
from moecore.measure.routing_metrics.expert_roles import (
    ExpertRoles,
    compare_seeds,
    read_encoded_choices,
)
from moecore.measure.routing_metrics.expert_similarity import (
    chance_agreement,
    decode_choices,
    indicator_correlation,
    match_experts,
    matched_agreement_by_image,
    seed_agreement,
)
from moecore.measure.values import Found
from moecore.nn.routers.expert_choice import ExpertChoice
from moecore.nn.routers.noisy_top_k import NoisyTopK
from moecore.nn.routers.told import Told
from moecore.report.claims.evaluation import evaluate_claims
from moecore.report.page import explorer_page
from moecore.report.pictures.expert_roles import figures
from moecore.report.study_results import Measured, Phase, Results
from moecore.report.tables.headline_metrics import draw_run_figures
from moecore.report.tables.metrics_by_method import compare_methods
from moecore.statistics import intervals
from moecore.study.sections import Question
from tests.measure.subjects import compute_without_cache, expert_roles, routing_with_roles
from tests.measure.test_truth import IMAGE, subject

FIRST = np.eye(3, dtype=bool)[[0, 0, 1, 1, 2, 2, 0, 1]]
SECOND = np.eye(3, dtype=bool)[[1, 1, 2, 2, 0, 0, 1, 0]]


def test_matching_by_hand():
    """Expert 0 is the other's 1, exactly; of the tokens of 1 the other's 2 lacks one."""
    expected = [[-0.6, 1, -0.447214], [-0.066667, -0.6, 0.745356], [0.745356, -0.447214, -1 / 3]]
    correlation = indicator_correlation(FIRST, SECOND)
    assert correlation == pytest.approx(np.array(expected), abs=1e-6)
    assert match_experts(correlation).tolist() == [1, 2, 0]
    assert correlation[range(3), [1, 2, 0]].mean() == pytest.approx(0.830237, abs=1e-6)
    nobody = indicator_correlation(FIRST, np.zeros_like(SECOND))
    assert (nobody == 0).all()


def test_compared_where_it_was_not_matched():
    """Images of one token: matched on 0, 2, 4, 6, compared on the others."""
    agreement = seed_agreement(FIRST[:, None], SECOND[:, None], np.arange(8) % 2 == 0)
    assert agreement.partners.tolist() == [1, 2, 0]
    assert agreement.correlation == pytest.approx(0.718234, abs=1e-6)
    assert agreement.overlap == 0.75
    rest = matched_agreement_by_image(FIRST[1::2, None], SECOND[1::2, None], agreement.partners)
    assert rest["correlation"].mean() == pytest.approx(0.718234, abs=1e-6)
    assert rest["overlap"].tolist() == [1, 1, 1, 0]
    with pytest.raises(UserError, match="one shape"):
        seed_agreement(FIRST[:, None], SECOND[:, None, :2], np.arange(8) % 2 == 0)


def test_unrelated_seeds_agree_by_chance():
    random = np.random.default_rng(0)
    ours, theirs = np.eye(4, dtype=bool)[random.integers(0, 4, (2, 100, 9))]
    is_fit = np.arange(100) % 2 == 0
    assert abs(seed_agreement(ours, theirs, is_fit).correlation) < 0.08
    assert chance_agreement(ours, theirs, is_fit) == pytest.approx((0, 0.25), abs=0.03)


def test_mean_over_pairs():
    """Pairs 0.2, 0.4, 0.6: without each seed 0.6, 0.4, 0.2; variance 2/3 · 0.08; t = 4.302653.

    A seed's own value is 3 · 0.4 − 2 · that without it: 0, 0.4, 0.8.
    """
    values = np.array([[9, 0.2, 0.4], [0.2, 9, 0.6], [0.4, 0.6, 9]])
    interval = intervals.mean_over_seed_pairs(values)
    half = 4.302653 * (2 / 3 * 0.08) ** 0.5
    assert interval.value == pytest.approx(0.4)
    assert (interval.low, interval.high) == pytest.approx((0.4 - half, 0.4 + half), abs=1e-5)
    assert intervals.seed_pseudo_values(values) == pytest.approx([0, 0.4, 0.8])
    pseudo_values = intervals.seed_pseudo_values(values)
    assert intervals.mean_over_seeds(pseudo_values) == pytest.approx(interval)
    assert intervals.seed_pseudo_values(values[:2, :2]) == pytest.approx([0.2, 0.2])
    assert intervals.mean_over_seed_pairs(values[:2, :2]).limits is None
    with pytest.raises(ValueError, match="fewer than two"):
        intervals.mean_over_seed_pairs(values[:1, :1])


def test_seeds_that_are_told_the_same_agree():
    """One model thrice: its choices are kept whole. What the page and compare.json say of it."""
    measured = subject(Told())
    result = expert_roles(measured, windows=(2,))
    chosen = decode_choices(read_encoded_choices(result)[0])
    assert chosen.shape == (40, 5, 3) and (chosen.sum(axis=-1) == 1).all()
    models = {"told": dict.fromkeys(range(3), Measured({ExpertRoles: result}))}
    phase = Phase("pretrain", {}, measured.model.image.task, models)
    agreement = compare_seeds(result, result)
    assert agreement.correlation == pytest.approx(1) and agreement.overlap == 1
    assert agreement.chance < 0.8
    display = explorer_page.display_of(ExpertRoles)
    first, second = display.blocks(phase)
    drawn = ["expert_information", "expert_similarity_1", "coactivation_1_2", "expert_similarity_2"]
    assert len(first.pictures) == 4 and [name for name, _ in figures(result)] == drawn
    assert second.grids[0].lines[0].items[0].text.startswith("1.00")
    results = Results({"pretrain": phase})
    compared = compare_methods(results)["told"]["pretrain"]
    stability = {"mean": agreement.correlation, "interval": "jackknife", "seeds": 3}
    assert stability.items() <= compared["seed_stability"].items()
    sides = {"method": "told", "against": "told", "against_metric": "seed_stability_chance"}
    asked = Question(asks="more?", metric="seed_stability", better="higher", **sides)
    (answer,) = evaluate_claims([asked], results)
    assert answer.difference.value == pytest.approx(agreement.correlation - agreement.chance)
    assert answer.ours.kind == "jackknife" and answer.difference.seeds == 3
    two = phase._replace(models={"told": dict(list(models["told"].items())[:2])})
    (answer,) = evaluate_claims([asked], Results({"pretrain": two}))
    assert answer.verdict == "open" and answer.p is None and answer.ours.interval.limits is None
    one = phase._replace(models={"told": {0: models["told"][0]}})
    assert len(display.blocks(one)) == 1
    assert "seed_stability" not in compare_methods(Results({"pretrain": one}))["told"]["pretrain"]
    assert compared["information_truth"]["mean"] == pytest.approx(1, abs=0.05)
    assert compared["consistency_2_chance"]["mean"] > 0
    assert compared["expert_cka"]["mean"] > compared["expert_cka_chance"]["mean"] > 0


def test_worth_and_regret_of_a_model():
    """Columns of compare.json hold their means, and the page draws their curves."""
    measured = subject(NoisyTopK(k=1))
    worth, regret = (
        one.collect_result(measured, compute_without_cache)
        for one in (ExpertWorth(images=20, draws=1), RouterRegret(images=4, tokens=2))
    )
    results = {ExpertWorth: worth, RouterRegret: regret}
    phase = Phase("pretrain", {}, measured.model.image.task, {"vmoe": {0: Measured(results)}})
    compared = compare_methods(Results({"pretrain": phase}))["vmoe"]["pretrain"]
    assert compared["expert_worth"]["mean"] == pytest.approx(worth.find("expert_worth").value)
    assert compared["router_regret"]["mean"] == pytest.approx(regret.find("router_regret").value)
    # one of three experts: the most that is at most half
    one = worth.find("lost_without_random", removed=1)
    assert compared["lost_without_random"]["mean"] == pytest.approx(one.value)
    lost = compared["lost_without_choice_1_reroute"]["mean"]
    assert lost == pytest.approx(worth.find("lost_without_choice_reroute", rank=1).value)
    shares = [compared[name]["mean"] for name in ("needed_experts", "better_sets")]
    assert all(0 <= share <= 1 for share in shares)
    (lost,) = explorer_page.display_of(ExpertWorth).blocks(phase)
    (left,) = explorer_page.display_of(RouterRegret).blocks(phase)
    assert [len(block.pictures) for block in (lost, left)] == [2, 1]


def test_what_the_explorer_knows_of_experts():
    """Of 4 experts 0 is chosen with 2 three times as often as with 1, 3 never; by hand."""
    together = [[0, 0.25, 0.75, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert explorer_page.list_partners(together) == [[(2, 0.75), (1, 0.25)], [(0, 1)], [(0, 1)], []]
    assert explorer_page.match_choices(FIRST[:, None], SECOND[:, None]) == [1, 2, 0]
    losses = intervals.Interval(0.02, -0.01, 0.05), intervals.Interval(-0.01, -0.04, 0.02)
    assert explorer_page.worth_words(losses, IMAGE.task.score) == [
        "Without it the accuracy is worse by +2.0 pp (−1.0 to +5.0).",
        "Without it the accuracy is worse by −1.0 pp (−4.0 to +2.0).",
    ]
    measured = Measured({}, ("router regret: experts have a capacity",))
    capacity, rest = explorer_page.open_questions(measured)
    assert capacity.endswith("does not apply: experts have a capacity.")
    assert rest.startswith("To see more, set routing.roles for which experts go together")
    assert "; name in run.measurements: expert_worth for" in rest and "regret" not in rest


def test_roles_are_a_part_of_what_the_stage_routing_wrote(tmp_path):
    """Not asked they are nothing, and refused a reason; the figures of the run have them, too."""
    display, item = explorer_page.display_of(ExpertRoles), "routing/pretrain/vmoe/0"
    path = tmp_path / f"artifacts/measured/{item}.json"
    asked = routing_with_roles(windows=(2,))
    read, drawn = [], []
    for settings, router in (
        (asked, NoisyTopK(k=1)),
        (asked.model_copy(update={"roles": None}), NoisyTopK(k=1)),
        (asked, ExpertChoice()),
    ):
        result = settings.collect_result(subject(router), compute_without_cache)
        write_json(path, to_jsonable(result))
        read.append(display.read(path, "routing"))
        drawn.append({name for name, _ in draw_run_figures(tmp_path, "routing", item)})
    assert isinstance(read[0], Found) and read[1] is None
    assert "tokens choose no experts" in read[2].skipped
    assert drawn[1] == drawn[2] < drawn[0] and "expert_information" in drawn[0] - drawn[1]


def test_seeds_are_halved_by_people():
    """Of two images a person, the halves are the first and third person's, and the others'."""
    measured = subject(NoisyTopK(k=1))
    split = measured.data.test._replace(people=np.arange(40) // 2)
    several = measured._replace(data=measured.data._replace(test=split))
    other = several._replace(model=subject(NoisyTopK(k=1), seed=1).model)
    results = [expert_roles(one, windows=(2,)) for one in (several, other)]
    assert read_encoded_choices(results[0])[0].people == tuple(np.arange(40) // 2)
    models = {"vmoe": dict(enumerate(Measured({ExpertRoles: one}) for one in results))}
    phase = Phase("pretrain", {}, measured.model.image.task, models)
    layers = zip(*map(read_encoded_choices, results), strict=True)
    chosen = [[decode_choices(layer) for layer in pair] for pair in layers]
    halves = [np.arange(40) // size % 2 == 0 for size in (2, 1)]
    correlations = [[seed_agreement(*pair, half).correlation for pair in chosen] for half in halves]
    expected, by_image = np.mean(correlations, axis=1)
    assert compare_seeds(*results).correlation == pytest.approx(expected) != by_image
    compared = compare_methods(Results({"pretrain": phase}))["vmoe"]["pretrain"]
    assert compared["seed_stability"]["mean"] == pytest.approx(expected)
