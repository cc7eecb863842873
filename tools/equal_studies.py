"""Compare the questions of pipelines/ with the studies from which they were made.

python -m tools.equal_studies FOLDER: a copy of pipelines/ in its old form.
"""

import sys
from pathlib import Path

from ruamel.yaml import YAML

from moecore.pipeline.dvc import stage_definitions, study_dvc_yaml_texts
from moecore.study.document import load_yaml_document
from moecore.study.layers import (
    compose_layers,
    load_overlay_layer,
    load_root_layer,
    read_layer,
)
from moecore.study.questions import load_questions
from moecore.study.sections import Claim


def load_study_presets(folder: Path):
    path = folder / "presets.yaml"
    if not path.is_file():
        return {}
    whole = load_yaml_document(path)
    return {name: whole.below(name) for name in whole.data}


def resolve_overlay(folder: Path, root: Path, presets=()):
    base = load_root_layer(root)
    known = load_study_presets(folder)
    layers = [
        base,
        load_overlay_layer(folder, base),
        *(read_layer(known[one], ()) for one in presets),
    ]
    return compose_layers(layers, root)


def differing_keys(old, new, keys=()):
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            if key not in old or key not in new:
                yield (*keys, key), old.get(key, "(absent)"), new.get(key, "(absent)")
            else:
                yield from differing_keys(old[key], new[key], (*keys, key))
    elif old != new or type(old) is not type(new) and not {type(old), type(new)} <= {int, float}:
        yield keys, old, new


def with_whole_claims(data, left_out=()):
    """Return a params.yaml with the defaults of its claims written out."""
    claims = [Claim.model_validate(one).model_dump(exclude=set(left_out)) for one in data["claims"]]
    return data | {"claims": claims}


def stages_of(folder: Path) -> dict:
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("dvc.yaml")}
    return {name: read_stages(p.read_text()) for name, p in files.items()}


def read_stages(text: str) -> dict:
    """Read a dvc.yaml, with deps in the order of DVC's lock file."""
    read = YAML(typ="safe").load(text)
    for stage in read["stages"].values():
        stage = stage.get("do", stage)
        stage["deps"] = sorted(stage.get("deps", ()))
    return read


TOGETHER = [
    "flowers top_1",
    "base cifar10",
    "pets unguided",
    "imagenet_upcycled swin_b_upcycled",
    "tiny_imagenet swin_tiny_imagenet experts_128 top_2",
    "imagenet swin_imagenet experts_64",
    "imagenet swin_moe_b",
    "tiny_imagenet vit_b",
    "tiny_imagenet top_4",
    "one_layer experts_32",
    "clip_b16 section_14",
    "tiny_imagenet experts_128 table_5_filter",
    "imagenet_upcycled swin_upcycled",
]


def differing_presets(question, before: Path) -> int:
    old = load_study_presets(before)
    problems = 0
    if list(old) != list(question.presets):
        print(f"{question.name}: presets {list(old)} → {list(question.presets)}")
        problems += 1
    chosen = [[name] for name in old] + [
        one.split() for one in TOGETHER if set(one.split()) <= set(old)
    ]
    for names in chosen:
        both = (
            resolve_overlay(before, Path(), names).document.data,
            question.rounds[0].compose(names).document.data,
        )
        # image_text's section_14 quoted another part of the study's sentence
        then, now = (with_whole_claims(one, {"quote"}) for one in both)
        for keys, was, is_now in differing_keys(then, now):
            print(f"{question.name} + {names}: {'.'.join(map(str, keys))}: {was} → {is_now}")
            problems += 1
    return bool(problems)


def main(before: Path) -> None:
    seen = set()
    problems = 0
    for question in load_questions(Path()):
        for one in question.rounds:
            if not one.was:
                continue
            seen.add(one.was)
            composed = one.compose()
            old = load_yaml_document(before / one.was / "params.yaml").data
            both = map(with_whole_claims, (old, composed.document.data))
            found = list(differing_keys(*both))
            texts = study_dvc_yaml_texts(
                stage_definitions(composed.stages), composed.document.data["run"]
            )
            new_stages = {name: read_stages(text) for name, text in texts.items()}
            if new_stages != stages_of(before / one.was):
                found.append((("dvc.yaml",), "…", "…"))
            for keys, was, now in found:
                print(f"{one.name} ({one.was}): {'.'.join(map(str, keys))}: {was} → {now}")
            problems += bool(found)
            if one.number == 1:
                problems += differing_presets(question, before / one.was)
    missing = {p.parent.name for p in before.glob("*/params.yaml")} - seen
    print(f"{len(seen)} equal but for {problems}; missing: {', '.join(sorted(missing)) or 'none'}")
    sys.exit(bool(problems or missing))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
