import re

import pytest

from moecore.core.files import UserError
from moecore.core.source_layout import ROOT
from moecore.study import check, yaml_document
from moecore.study.questions import QuestionFile, find_question, list_question_names, load_rounds
from tests.project import PARAMS

BASE = yaml_document.parse_yaml_document(PARAMS).data
WORLD = "model: {width: 24}\nmethods:\n  mine: {from: vmoe, router: {k: 1}}\n"
REACHED = "baseline: {{logistic: 80, neighbours: 79, cnn: 85, dense: {}, seconds: {}}}"
PAPER = """\
name: Mine
title: Mine
short: Mine
tables:
  - {number: table 1, shows: it, claims: {faster: {method: fast, against: vmoe, better: higher,
      metric: test_accuracy, effect: 0.1, phase: finetune, says: a, quote: B.}}}
"""


def values(question: QuestionFile, *presets: str, number: int = 1) -> dict:
    return question.round(number).compose(presets).document.data


def test_a_value_is_that_of_the_last_layer_that_has_it(ask):
    world = "model: {width: 24, depth: 2}\npretrain: {epochs: 3, batch: 8}\n"
    question = ask(
        "question: does it learn?\nanswer: so it does\nworld: small\n"
        "model: {width: 48}\nfinetune: {epochs: 5}\n"
        "rounds:\n  - {seeds: 0-2}\n  - {seeds: [7], finetune: {epochs: 6}}\n"
        "presets: {wide: {model: {width: 96}}, wider: {model: {width: 192}}}\n",
        small=world,
    )
    first, second = (values(question, number=number) for number in (1, 2))
    assert first["model"] == BASE["model"] | {"width": 48, "depth": 2}
    assert first["pretrain"] == BASE["pretrain"] | {"epochs": 3, "batch": 8}
    assert (first["run"]["seeds"], second["run"]["seeds"]) == ([0, 1, 2], [7])
    assert (first["finetune"]["epochs"], second["finetune"]["epochs"]) == (5, 6)
    assert values(question, "wide", "wider")["model"]["width"] == 192
    assert question.text("question") == "does it learn?" and question.rounds[-1].number == 2
    assert [one.name for one in question.rounds] == ["own/asked", "own/asked.2"]
    assert [one.folder.name for one in question.rounds] == ["own.asked", "own.asked.2"]
    assert question.results_path == question.root / "pipelines/results/own/asked.json"
    assert question.rounds[1].command == "moecore study run own/asked --round 2"


def test_sections_given_whole_and_other_kinds_inherit_nothing_and_null_removes(ask):
    question = ask(
        "world: one\nwhole: [routing]\nrouting: {images: 5}\n",
        one="whole: [pretrain]\npretrain: {epochs: 1}\nrouting: {overlays: 0}\n",
    )
    assert values(question)["routing"] == {"images": 5}
    assert values(question)["pretrain"] == {"epochs": 1}
    question = ask("methods: {vmoe: {router: {kind: told}}}\n")
    vmoe = BASE["methods"]["vmoe"] | {"router": {"kind": "told"}}
    assert values(question)["methods"]["vmoe"] == vmoe
    question = ask(
        "run: {phases: [pretrain]}\ndata: {finetune: null}\nclaims: null\n"
        "methods: {vmoe: {}, dense: null}\npretrain: {clip: null}\n"
    )
    data = values(question)
    assert list(data["data"]) == ["pretrain"] and "claims" not in data
    assert list(data["methods"]) == data["run"]["methods"] == ["vmoe"]
    assert data["pretrain"]["clip"] is None, "further in, null is a value"


def test_methods_are_those_that_the_question_or_its_round_names(ask):
    vmoe = BASE["methods"]["vmoe"]
    question = ask("methods:\n  vmoe: {router: {k: 1}}\n  own: {}\n")
    changed = vmoe | {"router": vmoe["router"] | {"k": 1}}
    assert values(question)["methods"] == {"vmoe": changed, "own": {}}
    assert values(question)["run"]["methods"] == ["vmoe", "own"]
    question = ask("world: one\nmethods: [own, vmoe]\n", one="methods: {own: {}, other: {}}\n")
    assert values(question)["methods"] == {"own": {}, "vmoe": vmoe}
    assert values(question)["run"]["methods"] == ["own", "vmoe"]
    question = ask("run: {methods: [vmoe]}\nmethods: {vmoe: {}, dense: {}}\n")
    assert values(question)["run"]["methods"] == ["vmoe"]
    assert list(values(question)["methods"]) == ["vmoe", "dense"]
    question = ask("run: {phases: [pretrain]}\n")
    assert values(question)["methods"] == BASE["methods"]
    assert values(question)["run"]["methods"] == BASE["run"]["methods"]
    question = ask(
        "methods: {one: {from: vmoe}, two: {from: vmoe}}\n"
        "rounds:\n  - {methods: [two, dense]}\n  - {seeds: [5]}\n"
    )
    assert list(values(question)["methods"]) == ["two", "dense"]
    assert values(question)["run"]["methods"] == ["two", "dense"]
    assert values(question, number=2)["run"]["methods"] == ["one", "two"]


def test_a_method_is_taken_from_the_nearest_of_its_name(ask):
    vmoe = BASE["methods"]["vmoe"]
    question = ask(
        "world: one\nmethods:\n  few: {from: vmoe, experts: {number: 2}}\n  vmoe: {}\n"
        "  many: {router: {k: 1}}\n  fewer: {from: few, router: {k: 1}}\n",
        one="methods:\n  many: {from: vmoe, experts: {number: 64}}\n"
        "  vmoe: {experts: {hidden_ratio: 1}}\n",
    )
    methods = values(question)["methods"]
    narrow = vmoe | {"experts": vmoe["experts"] | {"hidden_ratio": 1}}
    assert methods["vmoe"] == narrow
    assert methods["few"] == narrow | {"experts": narrow["experts"] | {"number": 2}}
    assert methods["fewer"]["experts"] == methods["few"]["experts"]
    assert methods["fewer"]["router"]["k"] == methods["many"]["router"]["k"] == 1
    assert methods["many"]["experts"] == narrow["experts"] | {"number": 64}
    question = ask("whole: [methods]\nmethods: {vmoe: {router: {kind: told}}}\n")
    assert values(question)["methods"] == {"vmoe": {"router": {"kind": "told"}}}


def test_presets_are_laid_over_in_order_and_their_methods_added(ask):
    question = ask(
        "methods: {vmoe: {}}\n"
        "presets: {one: {methods: {own: {from: vmoe}}}, two: {model: {width: 24}}}\n"
    )
    assert list(values(question, "one")["methods"]) == ["vmoe", "own"]
    assert values(question, "one", "two")["model"]["width"] == 24
    with pytest.raises(UserError, match="'tow', did you mean 'two'[?]; allowed: one, two"):
        values(question, "tow")


def write_paper(place) -> None:
    path = place / "pipelines/mine/paper.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PAPER, encoding="utf-8")


def test_claims_of_a_paper_are_written_out(ask, place):
    write_paper(place)
    question = ask(
        "asks:\n  - tgr/8_experts\n  - {claim: mine/faster, method: vmoe, against: dense}\n"
        "presets: {other: {asks: [mine/faster]}, none: {claims: []}}\n"
    )
    installed, own = values(question)["claims"]
    assert installed["paper"] == "TGR" and installed["source"] == "table 4"
    assert installed["effect"] == 0.0042 and "8 experts" in installed["quote"]
    faster = {"paper": "Mine", "source": "table 1", "metric": "test_accuracy", "effect": 0.1}
    faster |= {"phase": "finetune", "better": "higher", "says": "a", "quote": "B."}
    assert own == faster | {"method": "vmoe", "against": "dense"}
    (other,) = values(question, "other")["claims"]
    assert other == faster | {"method": "fast", "against": "vmoe"}
    assert values(question, "none")["claims"] == []
    composed = ask("asks: [mine/faster]\n").round(1).compose()
    with pytest.raises(UserError, match=r"mine/paper.yaml:5:52: claims\[0\].method: found 'fast'"):
        check.check_without_data(composed.document, composed.all_stages)
    seen = [path.relative_to(place) for path in question.asking_files if place in path.parents]
    assert [str(path) for path in seen] == ["pipelines/own/asked.yaml", "pipelines/mine/paper.yaml"]
    assert list_question_names(place) == ["own/asked"], "a paper's file is no question"


@pytest.mark.parametrize(
    ("old", "new", "place_and_key"),
    [
        ("shows: it", "show: it", "paper.yaml:5:23: tables[0].show"),
        ("title: Mine", "titel: Mine", "paper.yaml:2:1: titel"),
        ("claims: {", "claims: [{", "paper.yaml"),
    ],
)
def test_a_wrong_paper_names_its_line(ask, place, old, new, place_and_key):
    write_paper(place)
    path = place / "pipelines/mine/paper.yaml"
    path.write_text(path.read_text("utf-8").replace(old, new), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        ask("asks: [mine/faster]\n")
    assert f"pipelines/mine/{place_and_key}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "place_and_key", "word"),
    [
        ("modle: {}\n", "1:1: modle", "did you mean 'model'?"),
        ("- 1\n", "1:1", "found no mapping; allowed: sections of params.yaml (pac"),
        ("", "1:1", "is empty; allowed: a question and its sections"),
        ("stages: [pretrian]\n", "1:10: stages[0]", "did you mean 'pretrain'?"),
        ("whole: model\n", "1:1: whole", "found no list; allowed: a list of pack"),
        ("question: 5\n", "1:1: question", "found 5 (int); allowed: a text"),
        ("world: smal\n", "1:1: world", "did you mean 'small'?; allowed: small"),
        ("rounds: {}\n", "1:1: rounds", "allowed: a list of at least one round"),
        ("rounds: [{}]\nseeds: [1]\n", "2:1: seeds", "with rounds; allowed: in"),
        ("rounds:\n  - {sedes: [1]}\n", "2:6: sedes", "did you mean 'seeds'?"),
        ("rounds:\n  - {methods: {}}\n", "2:6: methods", "allowed: a list of na"),
        ("presets: [1]\n", "1:1: presets", "allowed: presets by their names"),
        ("presets: {one: {modle: 1}}\n", "1:17: modle", "did you mean 'model'?"),
        ("model: {width: wide}\n", "1:9: model.width", "found 'wide' (str)"),
        ("methods: [vmeo]\n", "1:11: methods", "found 'vmeo', did you mean 'vmoe'"),
        ("rounds:\n  - {methods: [dense, vmeo]}\n", "2:23: methods", "found 'vmeo'"),
        ("asks: tgr/8_experts\n", "1:1: asks", "allowed: a list of claims, paper/na"),
        ("asks: [trg/8_experts]\n", "1:8: asks[0]", "allowed: prc/, ermoe/, tgr/"),
        ("asks: [prc, 5]\n", "1:8: asks[0]", "allowed: prc/prediction_jumps, "),
        ("asks: [{against: vmoe}]\n", "1:8: asks[0]", "found '' (str)"),
        ("rounds:\n  - {asks: [tgr/8_expert]}\n", "2:13: asks[0]", "did you mean 'tgr/8_experts'?"),
        ("asks: []\nclaims: []\n", "2:1: claims", "with asks; allowed: one of"),
        ("asks:\n  - {claim: mine/faster, method: vmeo}\n", "2:26: claims[0].method", "did you"),
        ("seeds: 0-x\n", "1:1: run.seeds", "found '0-x' (str)"),
        ("seeds: [0, zero]\n", "1:12: run.seeds[1]", "found 'zero' (str)"),
        ("rounds:\n  - {seeds: [-1]}\n", "2:14: run.seeds[0]", "integers ≥ 0"),
        ("run: {methods: [vmeo]}\n", "1:17: run.methods[0]", "did you mean 'vm"),
        ("pretrain: null\n", "1:1: pretrain", "missing; the stage pretrain read"),
        ("methods: {own: {from: vmeo}}\n", "1:17: methods.own.from", "'vmoe'?; allowed: dense, vm"),
        ("methods: {a: {from: b}, b: {from: a}}\n", "1:29: methods.b.from", "found 'a'"),
        ("methods: {a: {from: vmoe, experts: {k: x}}}", "1:37: methods.a.experts.k", "unknown key"),
    ],
)
def test_a_wrong_question_names_its_line(ask, place, text, place_and_key, word):
    write_paper(place)
    with pytest.raises(UserError) as caught:
        question = ask(text, small=WORLD)
        for name in question.presets:
            question.round(1).compose([name])
        composed = question.round(1).compose()
        check.check_without_data(composed.document, composed.all_stages)
    (line,) = str(caught.value).split("\n")
    assert f"/pipelines/own/asked.yaml:{place_and_key}: " in line and word in line


@pytest.mark.parametrize(
    ("baseline", "said"),
    [
        ("", "1:1: baseline: missing; the file has: model, methods"),
        ("baseline: {}", "1:1: baseline: found dense 0, logistic 0; allowed: dense ahead by 3"),
        (REACHED.format(82.9, 60), "1:1: baseline: found dense 82.9, logistic 80; allowed: "),
        (
            REACHED.format(83, 91),
            "1:62: baseline.seconds: found 91 (int); allowed: less than or equal to 90",
        ),
        (REACHED.format(83, 90), None),
        ("baseline: {unreached: too few images}", None),
    ],
)
def test_a_world_says_what_a_dense_model_and_pixels_reach(ask, baseline, said):
    question = ask("world: small\nmethods: {asked: {from: mine}}\n", small=f"{baseline}\n{WORLD}")
    if said is None:
        assert question.check_world_baseline() is None and "baseline" not in values(question)
        return
    with pytest.raises(UserError) as caught:
        question.check_world_baseline()
    (line,) = str(caught.value).split("\n")
    assert "worlds/small.yaml:1:" in line and said in line


@pytest.mark.parametrize(
    ("file", "old", "new", "place_and_key"),
    [
        ("pipelines/worlds/small", "width: 24", "width: wide", "small.yaml:1:9: model.width"),
        ("pipelines/worlds/small", "k: 1", "k: x", "small.yaml:3:31: methods.asked.router.k"),
        ("pipelines/worlds/small", "from: vmoe", "from: vmeo", "small.yaml:3:10: methods.mine.fr"),
        ("pipelines/own/asked", "epochs: 9", "epochs: x", "asked.yaml:3:22: pretrain.epochs"),
        ("params", "number: 4", "number: x", "params.yaml:15:26: methods.asked.experts"),
    ],
)
def test_a_problem_is_found_in_the_layer_that_decides(ask, place, file, old, new, place_and_key):
    text = "world: small\nmethods: {asked: {from: mine}}\nrounds: [{pretrain: {epochs: 9}}]\n"
    ask(text, small=WORLD)
    path = place / f"{file}.yaml"
    content = path.read_text(encoding="utf-8")
    assert old in content
    path.write_text(content.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        composed = QuestionFile(place, "own/asked").round(None).compose()
        check.check_without_data(composed.document, composed.all_stages)
    assert f"/{place_and_key}" in str(caught.value).split("\n")[0]


@pytest.mark.parametrize("stages", ["null", "3", "text", "[a]"])
def test_a_dvc_yaml_without_stages_is_said(ask, place, stages):
    question = ask("methods: [vmoe]\n")
    (place / "dvc.yaml").write_text(f"stages: {stages}\n", encoding="utf-8")
    with pytest.raises(UserError, match=re.escape("dvc.yaml:1:1: stages: found")):
        values(question)


def test_a_question_is_found_by_its_name_its_file_and_its_old_name(ask, place):
    question = ask("methods: [vmoe]\nrounds: [{was: mine}, {was: mine_seeds}]\n", small="")
    names = ("own/asked", "asked", "pipelines/own/asked.yaml", "pipelines/own/asked")
    assert {find_question(place, name).name for name in names} == {question.name}
    with pytest.raises(UserError, match="now: moecore study run own/asked --round 2$"):
        find_question(place, "pipelines/mine_seeds")
    with pytest.raises(UserError, match="no question 'own/asekd', did you mean 'own/asked'?"):
        find_question(place, "own/asekd")
    with pytest.raises(UserError, match="found round 3; allowed: 1 to 2"):
        question.round(3)
    other = place / "pipelines/ours/asked.yaml"
    other.parent.mkdir()
    other.write_text("seeds: [1]\n", encoding="utf-8")
    with pytest.raises(UserError, match="which is ours/asked or own/asked; allowed: one of them"):
        find_question(place, "asked")
    assert find_question(place, "ours/asked").round(None).number == 1


def test_old_studies_are_named_in_one_line_and_have_one_new_name(tmp_path):
    (tmp_path / "pipelines/mine").mkdir(parents=True)
    for name in ("overlay.yaml", "dvc.yaml"):
        (tmp_path / "pipelines/mine" / name).write_text("stages: {}\n")
    with pytest.raises(UserError, match="mine/overlay.yaml: found a study's folder of moecore 0.2"):
        find_question(tmp_path, "mine")
    rounds = load_rounds(ROOT)
    old = [one.old_name for one in rounds if one.old_name]
    assert len(old) == len(set(old)) >= 54 and all(one.question.text("question") for one in rounds)
    assert len(list_question_names(ROOT)) < len(rounds)


def test_new_dialects_begin_with_the_models_of_dialects():
    dialects, new = (values(QuestionFile(ROOT, f"ours/{n}")) for n in ("dialects", "new_dialects"))
    for section in ("model", "teacher", "teacher_router", "pretrain"):
        assert new[section] == dialects[section]
    assert new["data"]["pretrain"] == dialects["data"]["pretrain"]
    assert new["methods"].items() <= dialects["methods"].items()
    assert new["run"]["seeds"] == dialects["run"]["seeds"]
