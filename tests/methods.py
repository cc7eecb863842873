"""Methods of tests/params.yaml: all, for one grid of builds and steps, and six for other places."""

from moecore.core.source_layout import ROOT
from moecore.study.document import load_yaml_document
from moecore.training.method import Method


def load_methods(path: str) -> dict[str, Method]:
    """Return the methods that a params.yaml of this repository has, by name."""
    entries = load_yaml_document(str(ROOT / path)).data["methods"]
    return {name: Method.model_validate(entry) for name, entry in entries.items()}


METHODS = load_methods("tests/params.yaml")
# Every kind of plan, a guided one, and one whose loss reads pairs of views
REPRESENTATIVE = ("prc_moge", "ermoe", "tgr", "stable_moe", "expert_choice", "soft_moe")
