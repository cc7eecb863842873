"""A few of the studies that tools/fuzz_studies.py draws: what the check accepts runs to its end."""

import os
from contextlib import chdir
from itertools import count

import pytest

from moecore.core.config import list_own_names
from moecore.nn.backbones.base_model import Backbone
from moecore.nn.experts.base import Experts
from moecore.nn.routers.base import Router
from moecore.pipeline.code_hashes import write_code
from moecore.training.regularizers.base import Regularizer
from tests import forked
from tools.draw_study import WORLDS, StudyDrawer, write_raw_data
from tools.fuzz_studies import is_accepted, list_stage_commands

ENVIRONMENT = {"MOECORE_THREADS": "1", "MOECORE_DEVICE": "cpu"}
NOT_DRAWN = {"folded"}  # the stage merge writes it


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    return write_raw_data(tmp_path_factory.mktemp("raw"))


@pytest.mark.parametrize("first", [19, 600])
def test_an_accepted_study_runs_to_its_end(first, raw, tmp_path):
    for seed in count(first):
        study = tmp_path / str(seed)
        study.mkdir()
        drawer = StudyDrawer(seed, raw)
        if drawer.name != "volumes" and is_accepted(drawer.draw_study(), seed, study):
            break
    with chdir(study):
        write_code("params.yaml")
    commands = list(list_stage_commands(study))
    assert commands[0] == ["code"] and commands[-1] == ["compare"]
    for words in commands[1:]:
        done = forked.run(study, words, os.environ | ENVIRONMENT)
        assert done.returncode == 0, f"seed {seed}: {words}\n{done.stderr}"


def test_every_part_is_drawn(raw):
    """New ones too: the drawer reads them from the schema."""
    drawn: dict[str, set[str]] = {"router": set(), "experts": set(), "regularizers": set()}
    worlds, models = set(), set()
    for seed in range(300):
        drawer = StudyDrawer(seed, raw)
        study = drawer.draw_study()
        worlds.add(drawer.name)
        models.add(study["model"]["kind"])
        for method in study["methods"].values():
            for key in ("router", "experts"):
                drawn[key] |= {method[key]["kind"]} if key in method else set()
            drawn["regularizers"] |= {loss["kind"] for loss in method.get("regularizers", ())}
    assert worlds == set(WORLDS) and models == set(list_own_names(Backbone))
    for key, family in (("router", Router), ("experts", Experts), ("regularizers", Regularizer)):
        assert drawn[key] == set(list_own_names(family)) - NOT_DRAWN
