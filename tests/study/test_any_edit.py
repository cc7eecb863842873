"""Whatever is written into params.yaml, the check answers in words."""

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moecore.core.files import UserError
from moecore.core.sources import ROOT
from moecore.study.document import parse
from moecore.study.foreseen import foresee
from tests.project import PARAMS

WORDS = st.sampled_from(["digits", "vit", "noisy_top_k", "every_2", "bicubic", "", "x"])
VALUES = st.one_of(
    st.integers(-2, 400),
    st.floats(allow_nan=True, allow_infinity=True),
    WORDS,
    st.none(),
    st.booleans(),
    st.lists(st.integers(-1, 5), max_size=3),
    st.builds(dict),
)


def _places(value, keys=()):
    """Every key of params.yaml that a person may edit, but for those that grow the data."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _places(inner, (*keys, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _places(inner, (*keys, index))
    if keys:
        yield keys


PLACES = sorted(_places(parse(PARAMS).data), key=str)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(PLACES), VALUES), min_size=1, max_size=3))
def test_no_edit_of_the_file_gives_a_traceback(tmp_path_factory, edits):
    """In order, or a UserError that names the file; nothing else."""
    folder = tmp_path_factory.mktemp("edited")
    (folder / "dvc.yaml").write_bytes((ROOT / "dvc.yaml").read_bytes())
    data = parse(PARAMS).data
    for keys, value in edits:
        inner = data
        try:
            for key in keys[:-1]:
                inner = inner[key]
            inner[keys[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue  # an edit before took the place away
    path = folder / "params.yaml"
    path.write_text(
        json.dumps(data).replace("Infinity", ".inf").replace("NaN", ".nan"), encoding="utf-8"
    )
    try:
        foresee(path)
    except UserError as error:
        assert "params.yaml:" in str(error)
