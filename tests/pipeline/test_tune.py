"""``moecore tune``: equal trainings for every method, the choice, and where it is used."""

import json

import pytest

from moecore.core.files import UserError, read_json, write_json
from moecore.data.prepared import Prepared, Split
from moecore.pipeline import tune
from moecore.pipeline.tune import (
    best_rate,
    choose_threshold,
    keep_tuned_rates,
    list_edge_choices,
    plan_tuning,
    untuned_problems,
)
from moecore.study.document import parse_yaml_document
from moecore.study.questions import QuestionFile
from tests.project import Project

QUESTION = """\
stages: [prepare, teacher_router, pretrain, compare]
run: {phases: [pretrain]}
methods: {dense: {}, vmoe: {}, few: {from: vmoe, experts: {number: 2}}}
teacher: {kind: no_teacher}
tune: {learning_rates: [1.0e-4, 2.0e-3, 1.0e-2], seeds: [8, 9]}
rounds:
  - {seeds: 0-1, methods: [dense, vmoe]}
  - {seeds: [4], methods: [few]}
"""


@pytest.fixture
def project(tmp_path) -> Project:
    project = Project(tmp_path).with_dvc()
    path = tmp_path / "pipelines/own/tuned.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(QUESTION, encoding="utf-8")
    return project


def question(project: Project) -> QuestionFile:
    return QuestionFile(project.folder, "own/tuned")


def kept_rates(project: Project, **chosen: float) -> dict:
    """Write the file of a tuning that chose these rates, without training."""
    run = plan_tuning(question(project))
    rates = list(run.tuning.learning_rates)
    methods = {name: {"learning_rate": rate, "scores": []} for name, rate in chosen.items()}
    kept = {"settings": run.digest, "learning_rates": rates, "methods": methods}
    write_json(run.question.tuned_file, kept)
    return kept


def test_every_method_of_every_round_is_trained_with_every_rate(project):
    run = plan_tuning(question(project))
    data = parse_yaml_document(run.text).data
    assert run.methods == ("dense", "vmoe", "few")
    assert data["run"]["seeds"] == [8, 9] and len(data["run"]["methods"]) == 9
    rates = [data["methods"][f"few_rate_{number}"]["pretrain"] for number in (1, 2, 3)]
    assert rates == [{"learning_rate": rate} for rate in (1e-4, 2e-3, 1e-2)]
    experts = [data["methods"][f"{name}_rate_2"]["experts"]["number"] for name in ("vmoe", "few")]
    assert experts[1] == 2 != experts[0]
    assert run.stages == ("prepare", "teacher_router", "pretrain", "compare")


def test_a_round_has_the_chosen_rates_of_its_methods_alone(project):
    kept_rates(project, dense=2e-3, vmoe=2e-3, few=1e-4)
    first, second = (part.compose().document.data["methods"] for part in question(project).rounds)
    assert list(first) == ["dense", "vmoe"] and list(second) == ["few"]
    assert first["vmoe"]["pretrain"] == {"learning_rate": 2e-3}
    assert second["few"]["pretrain"] == {"learning_rate": 1e-4}


@pytest.mark.parametrize(
    ("scores", "better", "best"),
    [
        ([[0.5, 0.7], [0.6, 0.7], [0.9, 0.2]], "higher", 1),
        ([[0.5, 0.7], [0.6, 0.7], [0.9, 0.2]], "lower", 2),
        ([[0.5], [0.5], [0.4]], "higher", 0),  # equally good: the lower rate
        ([[float("nan")], [0.1], [float("inf")]], "higher", 1),
        ([[float("nan")], [9.0], [float("-inf")]], "lower", 1),
    ],
)
def test_the_best_rate_is_that_of_the_best_mean(scores, better, best):
    assert best_rate(scores, better) == best


EIGEN = "eigen: {router: {kind: eigenbasis, threshold: 0.5}, experts: {kind: eigen, number: 4}}"
THRESHOLD = "seeds: [8, 9], threshold: {method: eigen, values: [-0.2, 0, 0.2]}"


@pytest.fixture
def with_threshold(project) -> QuestionFile:
    text = QUESTION.replace("few: {from: vmoe, experts: {number: 2}}", EIGEN)
    text = text.replace("few", "eigen").replace("seeds: [8, 9]", THRESHOLD)
    question(project).path.write_text(text, encoding="utf-8")
    return question(project)


def test_a_threshold_is_trained_with_and_then_used_by_all_methods_that_have_one(with_threshold):
    entries = parse_yaml_document(plan_tuning(with_threshold).text).data["methods"]
    thresholds = [settings["router"]["threshold"] for settings in entries.values()]
    assert thresholds == [-0.2, 0, 0.2] and set(entries) == {f"eigen_rate_{n}" for n in (1, 2, 3)}
    run = plan_tuning(with_threshold, 0.0)
    entries = parse_yaml_document(run.text).data["methods"]
    assert len(entries) == 9 and entries["eigen_rate_3"]["pretrain"] == {"learning_rate": 1e-2}
    assert entries["eigen_rate_3"]["router"]["threshold"] == 0
    assert "threshold" not in entries["vmoe_rate_3"]["router"]
    methods = {
        name: {"learning_rate": 2e-3, "also": run.also.get(name, {})} for name in run.methods
    }
    kept = {"settings": run.digest, "learning_rates": [1e-4, 2e-3, 1e-2], "methods": methods}
    write_json(with_threshold.tuned_file, kept | {"threshold": {"chosen": 0.0}})
    assert not list(untuned_problems(with_threshold))
    used = with_threshold.rounds[1].compose().document.data["methods"]["eigen"]
    assert used["router"]["threshold"] == 0 and used["pretrain"] == {"learning_rate": 2e-3}


@pytest.mark.parametrize(("shares", "chosen"), [((0, 0.003, 0.4), 0), ((0.01, 0.02, 0.4), None)])
def test_the_threshold_with_the_nearest_fallback_is_chosen(
    with_threshold, monkeypatch, shares, chosen
):
    fallback = dict(zip((-0.2, 0, 0.2), shares, strict=True))
    monkeypatch.setattr(tune.Prepared, "open", lambda folder: Prepared({}, *[Split([], [])] * 3))
    monkeypatch.setattr(tune, "load_model", lambda folder: folder)
    monkeypatch.setattr(tune, "predict_in_batches", lambda *_: ((), ()))
    monkeypatch.setattr(
        tune, "routing_means_over_layers", lambda _, k, value: {"fallback": fallback[value]}
    )
    run = plan_tuning(with_threshold)
    if chosen is None:
        with pytest.raises(UserError, match=r"tune.threshold.values: found -0.2 as the best"):
            choose_threshold(run, run.tuning.threshold)
    else:
        assert choose_threshold(run, run.tuning.threshold)["chosen"] == chosen


def test_a_threshold_of_a_method_without_one_is_refused(with_threshold):
    text = with_threshold.path.read_text("utf-8").replace("method: eigen", "method: vmoe")
    with_threshold.path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"tune.threshold.method: found vmoe; allowed: eigen"):
        plan_tuning(QuestionFile(with_threshold.root, with_threshold.name))


def test_a_choice_at_an_end_of_the_grid_is_refused(project):
    kept = kept_rates(project, dense=1e-4, vmoe=2e-3, few=1e-2)
    lines = list(list_edge_choices(question(project), kept))
    assert lines == list(untuned_problems(question(project)))
    where = f"{question(project).path}:5:8: tune.learning_rates: "
    end = " an end of the grid; allowed: a grid that goes on to"
    assert lines == [
        f"{where}found 0.0001 as the best rate of dense,{end} lower rates",
        f"{where}found 0.01 as the best rate of few,{end} higher rates",
    ]


def test_rates_chosen_for_other_settings_are_refused(project):
    (missing,) = untuned_problems(question(project))
    assert "own/tuned.tuned.json: does not exist; run `moecore tune own/tuned`" in missing
    done = project.moecore("study", "run", "own/tuned")
    assert done.returncode and missing in done.stderr
    kept_rates(project, dense=2e-3, vmoe=2e-3, few=2e-3)
    assert not list(untuned_problems(question(project)))
    path = question(project).path
    path.write_text(QUESTION.replace("number: 2", "number: 3"), encoding="utf-8")
    (changed,) = untuned_problems(question(project))
    assert "rates were chosen for other settings" in changed


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[8, 9]", "[4]", ":5:50: tune.seeds: found 4, a seed of a round; allowed: seeds"),
        ("[1.0e-4, 2", "[3.0e-3, 2", ":5:8: tune.learning_rates: found [0.003, 0.002, 0.01]"),
        ("1.0e-4, 2", "2", "tune.learning_rates: found"),
        ("tune: ", "#", "found no section tune; allowed: tune: {learning_rates:"),
    ],
)
def test_a_wrong_grid_is_one_line(project, old, new, message):
    path = question(project).path
    path.write_text(QUESTION.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError) as error:
        plan_tuning(question(project))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_rates_are_chosen_by_trainings_and_used(project):
    path = question(project).path
    text = QUESTION.replace(", few: {from: vmoe, experts: {number: 2}}", "").replace(
        "[8, 9]", "[8]"
    )
    path.write_text(text.partition("rounds:")[0] + "seeds: [0]\n", encoding="utf-8")
    done = project.moecore("tune", "own/tuned")
    kept = read_json(question(project).tuned_file)
    run = plan_tuning(question(project))
    assert kept == json.loads(json.dumps(keep_tuned_rates(run)))
    for name in ("dense", "vmoe"):
        choice = kept["methods"][name]
        means = [seeds[0] for seeds in choice["scores"]]
        assert choice["learning_rate"] == kept["learning_rates"][means.index(max(means))]
        history = run.folder / f"artifacts/measured/pretrain/{name}_rate_1/8.json"
        assert history.is_file() and len(choice["curves"]) == 3 and choice["curves"][0]
    is_edge = any(
        choice["learning_rate"] != kept["learning_rates"][1] for choice in kept["methods"].values()
    )
    assert ("an end of the grid" in done.stderr) == is_edge == bool(done.returncode)
    assert "validation accuracy at a learning rate of" in done.stdout
