"""A teacher that is trained here, on data of its own."""

from moecore.data.prepared import Prepared
from moecore.data.sources.clusters import Clusters
from moecore.data.sources.digits import Digits
from moecore.training.teachers.dense import Dense

SETTINGS = {
    "model": {"kind": "vit", "patch": 8, "width": 8, "depth": 1, "heads": 1},
    "training": {"epochs": 1, "batch": 4, "learning_rate": 1e-3},
}


def test_its_own_data_are_prepared_once(tmp_path):
    Digits(size=16).write(tmp_path / "pretrain")
    first = Prepared.open(tmp_path / "pretrain")
    assert Dense(**SETTINGS).open_data(first, tmp_path) is first
    own = Dense(**SETTINGS, data=Clusters(patch=8, grid=2, train=40, validation=10, test=10))
    opened = own.open_data(first, tmp_path)
    assert len(opened.train.labels) == 40 and opened.task.classes == ("-1", "+1")
    (opened.folder / "card.json").touch()  # what a second call would replace
    before = (opened.folder / "card.json").stat().st_mtime_ns
    own.open_data(first, tmp_path)
    assert (opened.folder / "card.json").stat().st_mtime_ns == before
