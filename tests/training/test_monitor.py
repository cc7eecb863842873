"""What a training sees of its routing: sums by hand, warnings, no bit of a result changed."""

import pytest
import torch

from moecore.core.routing_records import ModelOutput, RoutingRecord
from moecore.run.history_file import read_lines, routing_points
from moecore.run.run_record import record_run
from moecore.run.training import TrainingRun
from moecore.training.loop import iterate_training
from moecore.training.meter import Meter, sum_layer_routing
from moecore.training.method import Method
from moecore.training.monitor import LayerTotals, Monitor, build_routing_point, describe_point
from tests.training.small import CPU, SETTINGS, VMOE, assert_same_weights, logged_points, task

EVERY = Monitor(every=1, dead_after=6)
SOFT = Method(router={"kind": "soft_slots", "slots": 2}, experts={"kind": "mlp", "number": 4})


def record(probs: list, chosen: list) -> RoutingRecord:
    """One image's."""
    shares = torch.tensor([probs])
    flags = torch.tensor([chosen], dtype=torch.bool)
    return RoutingRecord(shares.log(), shares, flags.float(), flags, shares * flags)


def test_the_sums_of_a_layer_by_hand():
    scores = [[0.5, 0.3, 0.15, 0.05], [0.4, 0.1, 0.35, 0.15], [0.25, 0.25, 0.25, 0.25]]
    one = record(scores, [[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1]])
    totals = LayerTotals.of(sum_layer_routing(one).tolist())
    # margins 0.3 − 0.15 and 0.35 − 0.15; a token that chose all experts has none
    assert totals.counts == (3, 2, 2, 1) and (totals.tokens, totals.with_margin) == (3, 2)
    assert totals.margins == pytest.approx(0.35)
    entropies = [-sum(p * torch.tensor(p).log().item() for p in row) for row in scores]
    assert totals.entropies == pytest.approx(sum(entropies), rel=1e-5)


def test_the_meter_adds_steps_and_layers_and_reads_them_with_its_terms():
    meter = Meter(torch.device("cpu"), monitor=Monitor(every=2))
    narrow = record([[0.75, 0.25]], [[1, 0]])
    wide = record([[0.5, 0.3, 0.2], [0.5, 0.2, 0.3]], [[1, 0, 0], [1, 0, 0]])
    for step in range(4):  # two of which are counted
        output = ModelOutput(torch.zeros(1), (narrow,), text_routing=(wide,))
        meter.add(step, 1, {"loss": torch.tensor(1.0)}, torch.tensor(1.0), output)
    values, totals = meter.take("")
    assert values["loss"] == 1.0
    assert {name: layer.counts for name, layer in totals.items()} == {
        "MoE 1": (2, 0),
        "text MoE 1": (4, 0, 0),
    }


def totals(*counts: float) -> dict[str, LayerTotals]:
    """Of tokens that chose two experts each."""
    return {"MoE 1": LayerTotals(counts, sum(counts) / 2, 60.0, 6.0, 60.0)}


def test_load_death_and_collapse_by_hand():
    settings = Monitor(dead_after=20)
    first = build_routing_point(10, totals(60, 30, 29, 1), None, settings)
    layer = first.layers["MoE 1"]
    assert layer.max_violation == pytest.approx(1) and layer.load[0] == 0.5  # 60 of 120 over 30
    assert (layer.token_entropy, layer.margin, layer.idle) == (1.0, 0.1, (0, 0, 0, 0))
    assert "MoE 1: MaxVio 1, entropy 1, margin 0.1; dead 0  █▄▄▁" == describe_point(first)
    once = build_routing_point(20, totals(60, 30, 30, 0), first, settings)
    assert once.layers["MoE 1"].idle == (0, 0, 0, 10) and not once.warnings
    twice = build_routing_point(30, totals(60, 30, 30, 0), once, settings)
    assert twice.warnings == ("step 30: MoE 1: expert 3 had no token for 20 steps",)
    assert twice.layers["MoE 1"].dead == 1 and describe_point(twice).endswith("█▄▄·")
    # two experts a token: the others have 7 of 120 choices, where 60 were even; then 5
    still = build_routing_point(40, totals(60, 53, 7, 0), twice, settings)
    assert not still.warnings  # told once
    fallen = build_routing_point(50, totals(60, 55, 5, 0), still, settings)
    line = "the load collapsed, all but the busiest experts have 8% of an even share"
    assert fallen.warnings == (f"step 50: MoE 1: {line}",)
    assert not build_routing_point(60, totals(60, 60, 0, 0), fallen, settings).warnings


def test_a_layer_that_nobody_chose_and_one_that_all_choose_have_no_number_of_what_is_not_there():
    none = build_routing_point(1, {"MoE 1": LayerTotals((0, 0), 5, 1, 0, 0)}, None, Monitor())
    assert (none.layers["MoE 1"].max_violation, none.layers["MoE 1"].margin) == (None, None)
    every = build_routing_point(1, {"MoE 1": LayerTotals((5, 5), 5, 1, 0, 0)}, None, Monitor())
    assert (every.layers["MoE 1"].max_violation, every.warnings) == (0, ())


@pytest.mark.parametrize("method", [VMOE, SOFT])
def test_a_training_is_bit_equal_with_and_without(method):
    without, watched = task(method), task(method)
    alone = logged_points(iterate_training(without, SETTINGS, 0, CPU))
    points = list(iterate_training(watched, SETTINGS, 0, CPU, monitor=EVERY))
    assert logged_points(points) == alone
    assert_same_weights(watched, without)
    # 3 steps of 8 images of 5 tokens in each of the last two blocks
    assert all(list(one.routing) == ["MoE 1", "MoE 2"] for one in points)
    assert {layer.tokens for one in points for layer in one.routing.values()} == {3 * 8 * 5}


def test_routing_may_be_counted_rarely():
    points = iterate_training(task(), SETTINGS, 0, CPU, monitor=Monitor(every=4))
    # steps 0, 4, 8 of points at 3, 6, 9, 12
    assert [len(one.routing) for one in points] == [2, 2, 2, 0]


def run_training(work, kill_at: int | None = None) -> list:
    """Train in ``work``, or until an epoch ends there; return what was told of the routing."""

    def each_epoch(epoch: int) -> float | None:
        if epoch == kill_at:
            raise KeyboardInterrupt
        return 0.5 if epoch > 1 else None

    job = task()
    with torch.no_grad():  # tokens are about (10, 0, 0, …), so nobody chooses the last expert
        last = job.model.blocks[-1]
        last.norm2.bias[0], last.mlp.router.weight[3, 0] = 10, -1
    with record_run("pretrain", None, method="vmoe", seed=0, work=work) as run:
        training = TrainingRun(run, work, "pretrain", EVERY)
        training.train(job, SETTINGS, 0, each_epoch)
        assert training.log().warnings
    return [point for _, point in routing_points(read_lines(run.folder))]


def test_a_killed_training_tells_what_one_that_was_not_tells(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = run_training(tmp_path / "whole")
    assert [point.step for point in whole] == [3, 6, 9, 12]
    assert [point.agreement for point in whole] == [None, None, None, 0.5]
    with pytest.raises(KeyboardInterrupt):
        run_training(tmp_path / "killed", kill_at=2)
    assert run_training(tmp_path / "killed") == whole
    lines = [line for point in whole for line in point.warnings]
    assert lines and f"pretrain: {lines[0]}" in capsys.readouterr().err
