"""The table of sections says what the scripts read, and the model of the whole has their types."""

import importlib

import pytest

from moecore.core.sources import ROOT
from moecore.study.params import keys
from moecore.study.sections import MEASURED, SECTIONS
from moecore.study.slots import Slot, resolve
from moecore.study.study import Study

SCRIPTS = sorted(path.stem for path in (ROOT / "stages").glob("[a-z]*.py"))


def params_of(script: str) -> type | None:
    return getattr(importlib.import_module(f"stages.{script}"), "Params", None)


READERS = [name for name in SCRIPTS if name in SECTIONS and params_of(name) is not None]


@pytest.mark.parametrize("script", READERS)
def test_a_stage_reads_the_sections_that_the_table_names(script):
    read = {key.split(".")[0] for key in keys(params_of(script)).values()}
    assert read == set(SECTIONS[script])


@pytest.mark.parametrize("script", READERS)
def test_the_whole_has_the_types_of_the_parts(script):
    params = params_of(script)
    for name, key in keys(params).items():
        if key in Study.model_fields:
            whole = resolve(Slot.of(Study.model_fields[key]))
            part = resolve(Slot.of(params.model_fields[name]))
            assert whole.annotation == part.annotation
            assert whole.discriminator == part.discriminator


def test_every_section_is_known():
    named = {section for sections in SECTIONS.values() for section in sections}
    assert named | set(MEASURED) == set(Study.model_fields)
