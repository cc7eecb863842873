"""The images that trainings and the explorer look at, and what is kept of them after an epoch."""

import pytest

from moecore.core.files import UserError
from moecore.measure.routing_metrics.watched import (
    explored_places,
    keep_trace,
    kept_traces,
    spread_places,
    watched_epochs,
)
from moecore.nn.predict import predictions
from moecore.nn.traces import trace
from tests.measure.explored import images, moe, subject, volumes


def test_places_are_spread_and_stay():
    assert spread_places(16, 8) == [0, 8, 4, 12, 2, 10, 6, 14]
    for total in (1, 2, 7, 50, 10_000):
        every = spread_places(total, 32)
        assert len(every) == len(set(every)) == min(32, total)
        assert all(0 <= place < total for place in every)
        assert [spread_places(total, number) for number in (1, 5)] == [every[:1], every[:5]]
    assert sorted(spread_places(7, 99)) == list(range(7))


def test_there_are_fewer_volumes_than_images(tmp_path):
    assert len(explored_places(images(), 32)) == 32
    assert len(explored_places(volumes(tmp_path).data, 32)) == 6


def test_watched_epochs():
    assert watched_epochs(1) == (1,)
    assert watched_epochs(5) == (1, 2, 3, 4, 5)
    many = watched_epochs(300)
    assert len(many) == 12 and (many[0], many[-1]) == (1, 300)
    steps = {later - earlier for earlier, later in zip(many, many[1:], strict=False)}
    assert steps <= {27, 28}


def test_what_was_kept_is_what_the_model_did(tmp_path):
    models = {epoch: subject(images(), moe(), seed=epoch) for epoch in (1, 2)}
    data = models[1].data
    for epoch, model in models.items():
        keep_trace(tmp_path, epoch, model.model, data)
    found = kept_traces(tmp_path, data, 2)
    assert [one.epoch for one in found] == [1, 2]
    where = explored_places(data, 32)
    for one in found:
        assert one.images == tuple(where)
        seen = predictions(models[one.epoch].model, data.test.images[where], 32)
        assert one.trace == trace(*seen, data.task)
    assert found[0].trace != found[1].trace


def test_a_missing_epoch_is_named(tmp_path):
    model = subject(images(), moe())
    keep_trace(tmp_path, 1, model.model, model.data)
    with pytest.raises(UserError, match="traces/0002.json: no such file"):
        kept_traces(tmp_path, model.data, 2)
