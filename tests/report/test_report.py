import csv
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from moecore.core.config import Config
from moecore.core.files import UserError
from moecore.measure import Cost, Robustness
from moecore.report import report_files, result_types
from moecore.report.column import Column
from moecore.report.page.page_objects import format_column_cells
from moecore.report.page.report_page import render_report
from moecore.report.results_and_displays import read_results
from moecore.report.tables import metrics_by_method, terminal_summary
from moecore.report.tables.cells import (
    Cell,
    NumberFormat,
    cell_over_seeds,
    format_epsilon,
    format_epsilons_in_text,
)
from moecore.report.tables.metrics_by_method import best_by_disjoint_intervals, compare_methods
from moecore.statistics.intervals import Interval
from moecore.study.run_and_claims import RunSelection
from moecore.study.stages import MEASURED_STAGES
from tests.report.generated import write_results

MISSING = {  # file → stage
    "artifacts/measured/finetune/tgr/0.json": "finetune",
    "artifacts/measured/robustness/pretrain/dense/0.json": "robustness",
    "artifacts/data/finetune/card.json": "that",
}
METHODS = {"dense": False, "vmoe": True, "tgr": True}
COLUMN = Column("a", "a", lambda result: None)
HIGHER, LOWER = COLUMN._replace(better="higher"), COLUMN._replace(better="lower")
DAMAGED = ("", "[]", "null", "5", "[" * 100_000, "half", "folder")


def results(root, methods=METHODS, seeds=(0,), phases=("pretrain", "finetune")):
    write_results(root, methods, list(seeds), list(phases))
    run = RunSelection(methods=tuple(methods), seeds=tuple(seeds), phases=tuple(phases))
    return read_results(run, "run: {} # <settings> & more\n", root)


@pytest.fixture(scope="module")
def one_seed(tmp_path_factory):
    return results(tmp_path_factory.mktemp("one"))


def assert_self_contained(text: str) -> None:
    assert not re.search(r"""(src|href|url|@import)\s*[=(]?\s*["']?\s*(https?:)?//""", text)
    assert "<script " not in text and text.count("<script>") == 1 and "<link" not in text
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) and set(re.findall(r'href="#([^"]+)"', text)) <= set(ids)


def test_the_page_is_self_contained_and_complete(one_seed):
    text = render_report(one_seed)
    assert_self_contained(text)
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text
    assert "&lt;settings&gt; &amp; more" in text
    assert text.index("<h1") < text.index('class="lead"') < text.index("<svg")
    assert all(method in text for method in METHODS) and "Agreement with teacher" in text
    assert "Agreement before / after" in text
    assert "vmoe, seed 0: step 40: MoE 2: expert 1 had no token for 100 steps." in text
    assert "Measurements that do not apply to a method" in text
    assert "dense, routing: the model has no MoE layers." in text
    assert render_report(one_seed) == text, "twice the same, ids of figures too"


@pytest.mark.usefixtures("undrawn")
def test_dense_alone_and_several_seeds(tmp_path):
    dense = render_report(results(tmp_path / "dense", {"dense": False}, phases=["pretrain"]))
    assert_self_contained(dense)
    assert "Which expert" not in dense and "Load CV²" not in dense and "Routing change" not in dense
    assert "no expert is chosen" in dense and re.search("the accuracy of dense is [0-9.]+.%", dense)
    many = render_report(results(tmp_path / "many", seeds=[0, 1, 2], phases=["finetune"]))
    assert_self_contained(many)
    assert "Student" in many and "Wilson" not in many


def test_intervals_of_the_table(one_seed, tmp_path):
    found = compare_methods(one_seed)["vmoe"]["pretrain"]
    assert found["test_accuracy"]["interval"] == "wilson"
    assert found["ece_after"]["interval"] == "bootstrap" and "low" not in found["load_cv2"]
    assert found["parameters"] == {"mean": 1_240_000, "seeds": 1, "form": "count"}
    assert "load_cv2" not in compare_methods(one_seed)["dense"]["pretrain"]
    columns = metrics_by_method.build_table(one_seed, one_seed.phases["pretrain"]).metrics
    assert "agreement_before_after" not in {column.name for column in columns}, "no method has it"
    many = compare_methods(results(tmp_path, seeds=[0, 1]))["tgr"]["finetune"]
    assert many["test_accuracy"]["interval"] == "t" and many["test_accuracy"]["seeds"] == 2
    assert many["load_cv2"]["interval"] == "t"
    json.dumps(many, allow_nan=False)


def test_several_seeds_have_an_interval_over_items_and_seeds():
    # By hand: seeds have 1 and 3, items 1 and 3, so A = B = 1 and half² = 2·t(1)²; t(1) = 12.706.
    # A mean that no item moves, of one item, or of unlike numbers of them, has Student's.
    def cell(read, *seeds):
        mean = lambda result: float(np.mean(result.items))
        column = Column("a", "a", mean, kind=Kept, read_items=read)
        return cell_over_seeds(column, [result_types.ModelResults({Kept: one}) for one in seeds])

    two = Kept(items=(0, 2)), Kept(items=(2, 4))
    both = cell(lambda result: np.array(result.items), *two)
    assert both.kind == "items × seeds" and both.seeds == 2
    assert both.interval == pytest.approx((2, 2 - 2**0.5 * 12.7062, 2 + 2**0.5 * 12.7062), abs=1e-3)
    alone = cell(lambda result: None, *two)
    assert alone.kind == "t" and alone.interval.high == pytest.approx(2 + 12.7062, abs=1e-3)
    for others in ([(1, 1), (1, 1)], [(1,), (2,)], [(1, 2), (1, 2, 3)]):
        few = [Kept(items=items) for items in others]
        assert cell(lambda result: np.array(result.items), *few).kind == "t"


class Kept(Config):
    items: tuple[float, ...]


def cells(**limits):
    return {
        name: Cell(Interval((low + high) / 2, low, high), "t", 2)
        for name, (low, high) in limits.items()
    }


def test_the_best_is_marked_only_outside_the_intervals():
    away = cells(a=(0.1, 0.2), b=(0.3, 0.4), c=(0.41, 0.5))
    touching = cells(a=(0.1, 0.2), b=(0.3, 0.42), c=(0.41, 0.5))
    assert best_by_disjoint_intervals(HIGHER, away) == "c"
    assert best_by_disjoint_intervals(LOWER, away) == "a"
    assert best_by_disjoint_intervals(HIGHER, touching) is None
    assert best_by_disjoint_intervals(LOWER, touching) == "a"
    assert best_by_disjoint_intervals(COLUMN, away) is None
    assert best_by_disjoint_intervals(HIGHER, cells(a=(0, 1))) is None
    assert best_by_disjoint_intervals(HIGHER, {**away, "d": Cell(Interval(0.0), "", 1)}) is None


def test_a_file_that_is_missing_or_of_other_code_is_named(tmp_path):
    write_results(tmp_path, METHODS, [0], ["pretrain", "finetune"])
    run = RunSelection(methods=tuple(METHODS), seeds=(0,))
    for name, stage in MISSING.items():
        text = (tmp_path / name).read_text()
        (tmp_path / name).unlink()
        writer = "the stage that" if stage == "that" else f"stage {stage}"
        words = f"{name}: no such file; {writer} writes it"
        with pytest.raises(UserError, match=re.escape(words)):
            read_results(run, "", tmp_path)
        (tmp_path / name).write_text(text)
        if "measured" in name:
            (tmp_path / name).write_text(json.dumps(json.loads(text) | {"seats": 3}))
            words = rf"{name}: .* \(seats: .*\); run `dvc repro {stage}`"
            with pytest.raises(UserError, match=words):
                read_results(run, "", tmp_path)
            (tmp_path / name).write_text(text)


def spoiled(path: Path, contents: Sequence[str]) -> Iterator[None]:
    """Replace a file by each of these contents, by half of its own, and by a folder."""
    whole = path.read_text(encoding="utf-8")
    for content in contents:
        path.unlink()
        if content == "folder":
            path.mkdir()
        else:
            path.write_text(whole[: len(whole) // 2] if content == "half" else content)
        yield
    path.rmdir()
    path.write_text(whole)


def test_a_damaged_file_is_named_in_a_line(tmp_path):
    write_results(tmp_path, {"vmoe": True}, [0], ["pretrain"])
    run = RunSelection(methods=("vmoe",), seeds=(0,), phases=("pretrain",))
    for name in ("data/pretrain/card.json", "measured/routing/pretrain/vmoe/0.json"):
        for _ in spoiled(tmp_path / "artifacts" / name, ("{}", *DAMAGED)):
            with pytest.raises(UserError, match=re.escape(name)) as error:
                read_results(run, "", tmp_path)
            assert "\n" not in str(error.value) and "dvc repro" in str(error.value)


def test_the_end_of_a_run_has_the_best_methods_in_25_lines(tmp_path, capsys):
    cells: dict = {"first_sentence": {"text": "Thirty methods. " * 20}}  # two lines of 200 letters
    for number in range(30):
        accuracy = {"mean": number / 100, "low": 0.0, "high": 0.5, "form": "share"}
        cells[f"m{number}"] = dict.fromkeys(("pretrain", "finetune"), {"test_accuracy": accuracy})
    (tmp_path / "compare.json").write_text(json.dumps(cells))
    terminal_summary.print_run_summary(tmp_path / "compare.json")
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["phase", "method", "test", "accuracy"]
    assert [line.split()[1] for line in lines[:20]] == [f"m{n}" for n in range(29, 19, -1)] * 2
    assert lines[20] == "and 40 rows of other methods, on the page"
    assert len(lines) == 24 and lines[-1] == f"Page: {tmp_path / 'index.html'}"


def test_a_damaged_compare_json_is_named_in_a_line(tmp_path):
    path = tmp_path / "compare.json"
    path.write_text('{"vmoe": {"pretrain": {}}, "claims": {"one": {"says": "it holds"}}}')
    with pytest.raises(UserError, match="compare.json: was written by an older .*KeyError"):
        terminal_summary.main(str(path))
    for _ in spoiled(path, ('{"vmoe": 5}', *DAMAGED)):
        with pytest.raises(UserError, match=re.escape(str(path))) as error:
            terminal_summary.main(str(path))
        assert "\n" not in str(error.value)


@pytest.mark.usefixtures("undrawn")
def test_methods_left_on_disk_are_not_compared(tmp_path):
    write_results(tmp_path, METHODS, [0], ["pretrain"])
    run = RunSelection(methods=("vmoe",), seeds=(0,), phases=("pretrain",))
    found = read_results(run, "", tmp_path)
    assert list(compare_methods(found)) == ["vmoe"] and ">tgr<" not in render_report(found)


def test_csv_for_dvc_plots(one_seed):
    curves = list(csv.DictReader(report_files.training_csv(one_seed).splitlines()))
    attacks = list(csv.DictReader(report_files.robustness_csv(one_seed).splitlines()))
    assert len(curves) == 2 * 3 * 10 and {"seed", "validation_accuracy"} < set(curves[0])
    assert len(attacks) == 2 * 3 * 2 * 4
    assert {row["attack"] for row in attacks} == {"fgsm", "pgd-10"}


def test_numbers_and_limits_for_readers():
    texts = {"share": {0.9123: "91.2 %"}, "count": {12345: "12,345"}}
    texts |= {"seconds": {75: "1 min 15 s", 3725: "1 h 02 min", 9: "9 s"}}
    texts |= {"number": {0.0712: "0.0712", -0.0712: "−0.0712", 0.00001: "0.000010", 0: "0.0"}}
    texts["number"] |= {0.0000001: "< 0.000001", 12934.6: "12,935", 2.5e6: "2,500,000"}
    for form, expected in texts.items():
        assert {value: NumberFormat(form).value(value) for value in expected} == expected
    limits = (0.00002, 0.009), (0.00002, 0.00003), (43.85, 3505.2), (-0.4, 0.31)
    texts = ["0.0000 – 0.0090", "0.000020 – 0.000030", "44 – 3,505", "−0.40 – 0.31"]
    assert [NumberFormat().interval(*pair) for pair in limits] == texts


@pytest.mark.parametrize(
    ("values", "form", "expected"),
    [
        # half widths 0.021, 0.0007 and 0.5: the middle one decides
        ([(0.5, 0.479, 0.521), (0.3, 0.2993, 0.3007), (1, 0.5, 1.5)], "number", 3),
        ([(0.84, 0.833, 0.847)], "share", 2),  # ± 0.70 percentage points
        ([(0.84, 0.62, 1.0)], "share", 0),
        ([(0.84, None, None)], "share", 1),
        ([(4.76e-4, None, None), (0.02, None, None), (0.4, None, None)], "number", 4),
        ([(1e-9, None, None)], "number", 6),
        ([(12934.6, None, None), (0, None, None)], "number", 0),
        ([(3, 1, 5)], "count", 0),
        ([(3, 3, 3)], "number", 2),  # every seed alike
    ],
)
def test_digits_follow_the_width_of_the_intervals(values, form, expected):
    assert NumberFormat.of(form, [Interval(*value) for value in values]).places == expected


def test_a_column_has_one_notation_and_epsilons_are_named():
    cells = [Cell(Interval(value), "", 1) for value in (4.76e-04, 0.0, 0.02, 0.4)]
    texts = [item.text for item in format_column_cells(COLUMN, cells)]
    assert texts == ["0.0005", "0.0000", "0.0200", "0.4000"]
    tiny = format_column_cells(
        COLUMN, [Cell(Interval(value), "", 1) for value in (4.76e-06, 0.02, 0.4)]
    )
    assert [item.text for item in tiny] == ["< 0.0001", "0.0200", "0.4000"]
    assert [format_epsilon(8 / 255), format_epsilon(0.0313725)] == ["8/255"] * 2
    assert format_epsilon(0.05) == "0.05"
    said = "accuracy 3 %, at ε = 0.0313725; a guess has 10 % at ε = 0.5"
    assert (
        format_epsilons_in_text(said) == "accuracy 3 %, at ε = 8/255; a guess has 10 % at ε = 0.5"
    )


@pytest.mark.usefixtures("undrawn")
def test_a_phase_that_is_not_thorough_has_the_usual_stages_only(tmp_path):
    stages = [*MEASURED_STAGES, "cost"]
    write_results(tmp_path, METHODS, [0], ["pretrain"], stages)
    write_results(tmp_path, METHODS, [0], ["finetune"], MEASURED_STAGES)
    phases = {"phases": ("pretrain", "finetune"), "thorough": ("pretrain",)}
    run = RunSelection(methods=tuple(METHODS), seeds=(0,), measurements=("cost",), **phases)
    found = read_results(run, "", tmp_path, stages)
    assert len(found.phases["pretrain"].results(Cost)) == len(METHODS)
    assert found.phases["finetune"].results(Cost) == []
    assert found.phases["finetune"].results(Robustness)
    assert render_report(found).count("Latency") > 0
    with pytest.raises(UserError, match="cost/finetune"):
        read_results(run.model_copy(update={"thorough": None}), "", tmp_path, stages)
    words = "thorough names adversarial; allowed: pretrain, finetune, as in phases"
    with pytest.raises(ValidationError, match=words):
        RunSelection(methods=("dense",), seeds=(0,), thorough=("adversarial",))
