import itertools

import numpy as np
import pytest
import torch

from moecore.core.files import UserError, to_jsonable, write_json
from moecore.measure import ExpertWorth, RouterRegret
from moecore.measure.routing_metrics import expert_roles as module
from moecore.measure.routing_metrics import expert_similarity
from moecore.measure.routing_metrics.expert_similarity import decode_choices, seed_agreement
from moecore.measure.training import Trained, collect_outcome_values
from moecore.measure.truth import Truth, measure_truth
from moecore.measure.values import Found, Value
from moecore.report.claims.evaluation import evaluate_claims
from moecore.report.column import Column
from moecore.report.figures import overview
from moecore.report.figures.overview import draw_overview, methods_to_label
from moecore.report.headline_quantities import QuantityByMethod, choose_main_quantities
from moecore.report.page import explorer_page
from moecore.report.page.report_page import main_finding
from moecore.report.pictures import experts
from moecore.report.report_files import draw_run_figures
from moecore.report.result_types import ModelResults, PhaseResults, StudyResults
from moecore.report.tables.cells import Cell, keep_percent_on_line
from moecore.report.tables.metrics_by_method import build_table, compare_methods
from moecore.report.tables.terminal_summary import main_result_sentence
from moecore.routers import ExpertChoice, NoisyTopK, Told
from moecore.statistics import intervals
from moecore.statistics.comparisons import encode_item_values
from moecore.statistics.intervals import Interval
from moecore.study.run_and_claims import Question
from moecore.tasks.next_token import NextToken
from tests.measure.subjects import compute_without_cache, expert_roles, routing_with_roles
from tests.measure.test_truth import IMAGE, subject
from tests.report import generated

FIRST = np.eye(3, dtype=bool)[[0, 0, 1, 1, 2, 2, 0, 1]]
SECOND = np.eye(3, dtype=bool)[[1, 1, 2, 2, 0, 0, 1, 0]]
ROUTERS = "methods: {dense: {}, vmoe: {router: {kind: top}}, told: {router: {kind: told}}}"
RIGHT = {"dense": 4, "vmoe": 6, "told": 9}  # of ten images


def test_matching_by_hand():
    """Expert 0 is the other's 1, exactly; of the tokens of 1 the other's 2 lacks one."""
    expected = [[-0.6, 1, -0.447214], [-0.066667, -0.6, 0.745356], [0.745356, -0.447214, -1 / 3]]
    correlation = expert_similarity.indicator_correlation(FIRST, SECOND)
    assert correlation == pytest.approx(np.array(expected), abs=1e-6)
    assert expert_similarity.match_experts(correlation).tolist() == [1, 2, 0]
    assert correlation[range(3), [1, 2, 0]].mean() == pytest.approx(0.830237, abs=1e-6)
    assert (expert_similarity.indicator_correlation(FIRST, np.zeros_like(SECOND)) == 0).all()


def test_compared_where_it_was_not_matched():
    """Images of one token: matched on 0, 2, 4, 6, compared on the others."""
    agreement = seed_agreement(FIRST[:, None], SECOND[:, None], np.arange(8) % 2 == 0)
    assert agreement.partners.tolist() == [1, 2, 0]
    assert agreement.correlation == pytest.approx(0.718234, abs=1e-6) and agreement.overlap == 0.75
    sides = FIRST[1::2, None], SECOND[1::2, None]
    rest = expert_similarity.matched_agreement_by_image(*sides, agreement.partners)
    assert rest["correlation"].mean() == pytest.approx(0.718234, abs=1e-6)
    assert rest["overlap"].tolist() == [1, 1, 1, 0]
    with pytest.raises(UserError, match="one shape"):
        seed_agreement(FIRST[:, None], SECOND[:, None, :2], np.arange(8) % 2 == 0)


def test_unrelated_seeds_agree_by_chance():
    random = np.random.default_rng(0)
    ours, theirs = np.eye(4, dtype=bool)[random.integers(0, 4, (2, 100, 9))]
    is_fit = np.arange(100) % 2 == 0
    assert abs(seed_agreement(ours, theirs, is_fit).correlation) < 0.08
    told = pytest.approx((0, 0.25), abs=0.03)
    assert expert_similarity.chance_agreement(ours, theirs, is_fit) == told


def test_mean_over_pairs():
    # Pairs 0.2, 0.4, 0.6: without each seed 0.6, 0.4, 0.2; variance 2/3 · 0.08; t = 4.302653. A
    # seed's own value is 3 · 0.4 − 2 · that without it: 0, 0.4, 0.8.
    values = np.array([[9, 0.2, 0.4], [0.2, 9, 0.6], [0.4, 0.6, 9]])
    interval = intervals.mean_over_seed_pairs(values)
    half = 4.302653 * (2 / 3 * 0.08) ** 0.5
    assert interval.value == pytest.approx(0.4)
    assert (interval.low, interval.high) == pytest.approx((0.4 - half, 0.4 + half), abs=1e-5)
    assert intervals.jackknife_pseudo_values(values) == pytest.approx([0, 0.4, 0.8])
    pseudo_values = intervals.jackknife_pseudo_values(values)
    assert intervals.mean_over_seeds(pseudo_values) == pytest.approx(interval)
    assert intervals.jackknife_pseudo_values(values[:2, :2]) == pytest.approx([0.2, 0.2])
    assert intervals.mean_over_seed_pairs(values[:2, :2]).limits is None
    with pytest.raises(ValueError, match="fewer than two"):
        intervals.mean_over_seed_pairs(values[:1, :1])


def test_seeds_that_are_told_the_same_agree():
    """One model thrice: its choices are kept whole. What the page and compare.json say of it."""
    measured = subject(Told())
    result = expert_roles(measured, windows=(2,))
    chosen = decode_choices(module.read_encoded_choices(result)[0])
    assert chosen.shape == (40, 5, 3) and (chosen.sum(axis=-1) == 1).all()
    models = {"told": dict.fromkeys(range(3), ModelResults({module.ExpertRoles: result}))}
    phase = PhaseResults("pretrain", {}, measured.model.image.task, models)
    agreement = module.compare_seeds(result, result)
    assert agreement.correlation == pytest.approx(1) and agreement.overlap == 1
    assert agreement.chance < 0.8
    display = explorer_page.find_display(module.ExpertRoles)
    first, second = display.blocks(phase)
    drawn = ["expert_information", "expert_similarity_1", "coactivation_1_2", "expert_similarity_2"]
    assert len(first.pictures) == 4
    assert [name for name, _ in experts.draw_expert_roles(result)] == drawn
    assert second.grids[0].lines[0].items[0].text.startswith("1.00")
    results = StudyResults({"pretrain": phase})
    compared = compare_methods(results)["told"]["pretrain"]
    stability = {"mean": agreement.correlation, "interval": "jackknife", "seeds": 3}
    assert stability.items() <= compared["seed_stability"].items()
    sides = {"method": "told", "against": "told", "against_metric": "seed_stability_chance"}
    asked = Question(asks="more?", metric="seed_stability", better="higher", **sides)
    (answer,) = evaluate_claims([asked], results)
    assert answer.difference.value == pytest.approx(agreement.correlation - agreement.chance)
    assert answer.ours.kind == "jackknife" and answer.difference.seeds == 3
    two = phase._replace(models={"told": dict(list(models["told"].items())[:2])})
    (answer,) = evaluate_claims([asked], StudyResults({"pretrain": two}))
    assert answer.verdict == "open" and answer.p is None and answer.ours.interval.limits is None
    one = phase._replace(models={"told": {0: models["told"][0]}})
    assert len(display.blocks(one)) == 1
    of_one = compare_methods(StudyResults({"pretrain": one}))["told"]["pretrain"]
    assert "seed_stability" not in of_one
    assert compared["information_truth"]["mean"] == pytest.approx(1, abs=0.05)
    assert compared["consistency_2_chance"]["mean"] > 0
    assert compared["expert_cka"]["mean"] > compared["expert_cka_chance"]["mean"] > 0


def test_worth_and_regret_of_a_model():
    """Columns of compare.json hold their means, and the page draws their curves."""
    measured = subject(NoisyTopK(k=1))
    asked = (ExpertWorth(images=20, draws=1), RouterRegret(images=4, tokens=2))
    worth, regret = (one.collect_result(measured, compute_without_cache) for one in asked)
    results = {ExpertWorth: worth, RouterRegret: regret}
    phase = PhaseResults(
        "pretrain", {}, measured.model.image.task, {"vmoe": {0: ModelResults(results)}}
    )
    compared = compare_methods(StudyResults({"pretrain": phase}))["vmoe"]["pretrain"]
    assert compared["expert_worth"]["mean"] == pytest.approx(worth.find("expert_worth").value)
    assert compared["router_regret"]["mean"] == pytest.approx(regret.find("router_regret").value)
    # one of three experts: the most that is at most half
    one = worth.find("lost_without_random", removed=1)
    assert compared["lost_without_random"]["mean"] == pytest.approx(one.value)
    lost = compared["lost_without_choice_1_reroute"]["mean"]
    assert lost == pytest.approx(worth.find("lost_without_choice_reroute", rank=1).value)
    shares = [compared[name]["mean"] for name in ("needed_experts", "better_sets")]
    assert all(0 <= share <= 1 for share in shares)
    (lost,) = explorer_page.find_display(ExpertWorth).blocks(phase)
    (left,) = explorer_page.find_display(RouterRegret).blocks(phase)
    assert [len(block.pictures) for block in (lost, left)] == [2, 1]


def test_what_the_explorer_knows_of_experts():
    """Of 4 experts 0 is chosen with 2 three times as often as with 1, 3 never; by hand."""
    together = [[0, 0.25, 0.75, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    partners = explorer_page.list_partners(together, 3)
    assert partners == [[(2, 0.75), (1, 0.25)], [(0, 1)], [(0, 1)], []]
    assert explorer_page.match_experts_by_choices(FIRST[:, None], SECOND[:, None]) == [1, 2, 0]
    losses = intervals.Interval(0.02, -0.01, 0.05), intervals.Interval(-0.01, -0.04, 0.02)
    assert explorer_page.describe_worth_of_experts(losses, IMAGE.task.score) == [
        "Without it the accuracy is worse by +2.0 pp (−1.0 to +5.0).",
        "Without it the accuracy is worse by −1.0 pp (−4.0 to +2.0).",
    ]
    measured = ModelResults({}, ("router regret: experts have a capacity",))
    capacity, rest = explorer_page.describe_unmeasured(measured)
    assert capacity.endswith("does not apply: experts have a capacity.")
    assert rest.startswith("To see more, set routing.roles for which experts go together")
    assert "; name in run.measurements: expert_worth for" in rest and "regret" not in rest


def test_roles_are_a_part_of_what_the_stage_routing_wrote(tmp_path):
    """Not asked they are nothing, and refused a reason; the figures of the run have them, too."""
    display, item = (explorer_page.find_display(module.ExpertRoles), "routing/pretrain/vmoe/0")
    path = tmp_path / f"artifacts/measured/{item}.json"
    asked = routing_with_roles(windows=(2,))
    read, drawn = [], []
    none = asked.model_copy(update={"roles": None})
    top = NoisyTopK(k=1)
    for settings, router in ((asked, top), (none, top), (asked, ExpertChoice())):
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
    assert module.read_encoded_choices(results[0])[0].people == tuple(np.arange(40) // 2)
    models = {"vmoe": dict(enumerate(ModelResults({module.ExpertRoles: one}) for one in results))}
    phase = PhaseResults("pretrain", {}, measured.model.image.task, models)
    layers = zip(*map(module.read_encoded_choices, results), strict=True)
    chosen = [[decode_choices(layer) for layer in pair] for pair in layers]
    halves = [np.arange(40) // size % 2 == 0 for size in (2, 1)]
    correlations = [[seed_agreement(*pair, half).correlation for pair in chosen] for half in halves]
    expected, by_image = np.mean(correlations, axis=1)
    assert module.compare_seeds(*results).correlation == pytest.approx(expected) != by_image
    compared = compare_methods(StudyResults({"pretrain": phase}))["vmoe"]["pretrain"]
    assert compared["seed_stability"]["mean"] == pytest.approx(expected)


def trained(right: int, seed: int) -> ModelResults:
    scores = (np.arange(10) + seed) % 10 < right
    changes = {"purity": (0.3, right / 10), "test_score": generated.estimate(right / 10, 0.0, 1.0)}
    changes |= {"test_items": encode_item_values(scores.astype(float))}
    outcome = generated.trained(0, seed, False, "pretrain").model_copy(update=changes)
    result = Found(values=changed(right), facts={"counts": []})
    return ModelResults({Trained: collect_outcome_values(outcome), Truth: result})


def changed(right: int) -> list[Value]:
    places = [({"noise": 0.0}, 0.0), ({"noise": 0.2}, 0.02), ({"change": "noise_0_2"}, 0.02)]
    places += [({"attack": 0.0}, 0.0), ({"attack": 8.0}, 0.01), ({"change": "attack_8"}, 0.01)]
    return [Value(metric="changed_purity", at=at, value=right / 10 - less) for at, less in places]


def phase(**right: int) -> PhaseResults:
    models = {name: {seed: trained(r, seed) for seed in range(3)} for name, r in right.items()}
    return PhaseResults("pretrain", {"name": "digits"}, generated.TASK, models)


def test_a_method_between_floor_and_ceiling():
    """(6 - 4) / (9 - 4) of ten images, with each seed."""
    share = experts.routing_gain_share(phase(**RIGHT), "vmoe")
    assert share.value == pytest.approx(0.4) and (share.seeds, share.items) == (3, 10)
    (block,) = experts.truth_blocks(phase(**RIGHT))
    said = [line for line in block.words if line.startswith("vmoe finds 40 % [")]
    half = 100 * share.half_width()
    assert f"[{40 - half:.0f} – {40 + half:.0f}]" in said[0], "the lower limit first"
    assert len(said) == 1 and not any(line.startswith("told") for line in block.words)
    results = StudyResults({"pretrain": phase(**RIGHT)})
    (first,) = results.phases.values()
    known = {"pretrain": choose_main_quantities(first, build_table(results, first))}
    assert main_finding(results, known, (), ()).startswith(keep_percent_on_line(said[0]))
    compared = compare_methods(results)
    cells = {method: compared[method]["pretrain"]["headroom_recovered"] for method in RIGHT}
    assert cells["dense"]["mean"] == 0 and cells["told"]["mean"] == 1
    _, low, high = share.interval()
    ours = (cells["vmoe"][key] for key in ("mean", "low", "high"))
    assert tuple(ours) == pytest.approx((0.4, low, high))


def test_the_first_figure_has_floor_and_ceiling():
    """Dashed lines at 0.4 and 0.9, all points in the panel; without the ceiling there are none."""
    for methods, expected in ((RIGHT, [0.4, 0.9]), ({"dense": 4, "vmoe": 6}, [])):
        found = StudyResults({"pretrain": phase(**methods)})
        (known,) = found.phases.values()
        (picture,) = draw_overview(known, choose_main_quantities(known, build_table(found, known)))
        axes = picture.figure.axes[0]
        dashed = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"]
        assert dashed == pytest.approx(expected)
        left, right = axes.get_xlim()
        assert all(left <= x <= right for line in axes.lines for x in line.get_xdata())


def test_the_ceiling_is_never_the_best():
    """All right, beyond chance: marked where no settings say that the router is told."""
    known = phase(dense=1, vmoe=5, told=10)
    for settings, best in ("", "told"), (ROUTERS, "vmoe"):
        found = StudyResults({"pretrain": known}, settings)
        cells = build_table(found, known).cells
        assert [name for name in cells if cells[name]["test_accuracy"].marked] == [best]
    quantities = choose_main_quantities(known, build_table(found, known), found.controls)
    said = main_result_sentence(found)
    assert "(dense and vmoe; not compared: told; 3 seeds): vmoe is 40 p" in said
    assert said.count("told") == 1 and list(quantities.score.floor_and_ceiling) == ["dense", "told"]


def test_of_many_points_the_figure_names_floor_ceiling_and_the_best():
    """Thirteen methods: the best three clean, and the best three under attack."""
    values = {f"m{number}": 0.3 + number / 100 for number in range(11)}
    values |= {"dense": 0.1, "told": 0.2}
    score = QuantityByMethod("", Column("x", "x", float, "higher"), as_cells(values))
    errors = QuantityByMethod("", Column("x", "x", float, "lower"), as_cells(values))
    assert methods_to_label(score, errors) == {"dense", "told", "m0", "m8", "m9", "m10"}
    looks = {name: {"color": "black", "marker": "o"} for name in values}
    (axes,) = overview.draw_clean_against_attacked(score, errors, looks).axes
    assert {text.get_text() for text in axes.texts} == methods_to_label(score, errors)
    assert len([line for line in axes.lines if line.get_marker() == "o"]) == 13


@pytest.mark.parametrize(("first", "step"), [(0.885, 0.004), (0.9, 0.0012), (0.99, 0.002)])
def test_labels_of_an_axis_do_not_touch_where_scores_are_within_two_points(first, step):
    values = {name: first + step * place for place, name in enumerate("abcde")}
    looks = {name: {"color": "black", "marker": "o"} for name in values}
    score = QuantityByMethod("", Column("x", "x", float, "higher", "share"), as_cells(values))
    score = score._replace(phrase="on clean test data")
    figures = (
        overview.draw_clean_against_attacked(score, score, looks),
        overview.draw_quantity_panels([score] * 3, looks),
    )
    for figure in figures:
        figure.canvas.draw()
        labels = figure.axes[0].get_xticklabels()
        low, high = figure.axes[0].get_xlim()
        inside = [text for text in labels if low <= text.get_position()[0] <= high]
        boxes = [text.get_window_extent() for text in inside]
        apart = [right.x0 - left.x1 for left, right in itertools.pairwise(boxes)]
        assert len(apart) > 1 and min(apart) > 5 / 72 * figure.dpi


def as_cells(values: dict[str, float]) -> dict[str, Cell]:
    return {name: Cell(Interval(value), "", 1) for name, value in values.items()}


def test_experts_beyond_the_kinds_are_said_to_match_none():
    kinds = torch.tensor([[1, 2]]).repeat(5, 1)
    for number, said in (2, "Percent of each expert's tokens."), (4, "the last 2 are matched to "):
        counts = measure_truth(kinds - 1, kinds, number, 2).counts
        ((_, figure),) = experts.draw_true_kinds_by_expert(
            Found(values=(), facts={"counts": [counts]})
        )
        assert said in figure.caption


def test_of_a_text_less_is_better():
    nats = {name: 10 - number for name, number in RIGHT.items()}
    share = experts.routing_gain_share(phase(**nats)._replace(task=NextToken(words=9)), "vmoe")
    assert share.value == pytest.approx(0.4)


@pytest.mark.parametrize("method", RIGHT)
def test_without_floor_or_ceiling_or_worth_there_is_no_share(method):
    others = {name: number for name, number in RIGHT.items() if name != method}
    assert experts.routing_gain_share(phase(**others), "vmoe") is None
    assert experts.routing_gain_share(phase(**RIGHT | {"told": 4}), method) is None


def test_purity_over_epochs_under_noise_and_under_attack():
    """vmoe: 0.6 clean, 2 points less with σ = 0.2, 1 less with ε = 8/255."""
    axes = [picture.figure.axes[0] for picture in experts.draw_purity_curves(phase(**RIGHT))]
    curves = [one.lines[1].get_xydata() for one in axes]
    expected = [[1, 0.3], [2, 0.6]], [[0, 0.6], [0.2, 0.58]], [[0, 0.6], [8, 0.59]]
    assert np.array(curves) == pytest.approx(np.array(expected))
    compared = compare_methods(StudyResults({"pretrain": phase(**RIGHT)}))["vmoe"]["pretrain"]
    purities = (compared[name]["mean"] for name in ("purity_noise_0_2", "purity_attack_8"))
    assert tuple(purities) == pytest.approx((0.58, 0.59))
