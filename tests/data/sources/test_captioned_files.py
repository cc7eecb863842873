"""COCO's and Flickr30k's captions, from generated files in their forms."""

import json

import numpy as np
import pytest
from PIL import Image

from moecore.core.files import UserError
from moecore.data.prepared import Prepared
from moecore.data.sources.coco_captions import CocoCaptions
from moecore.data.sources.flickr30k import Flickr30k
from moecore.data.text.tokenizers import tokenizer_in

COLOURS = ("red", "green", "blue", "white", "black")


def picture(path, number: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((20, 30, 3), number * 9 % 256, np.uint8)
    Image.fromarray(pixels).save(path)


def coco(root, number: int = 20, year: str = "train2014", first: int = 0):
    """An annotation file in COCO's form and its images; captions in another order than images."""
    ids = range(first, first + number)
    images = [{"id": one, "file_name": f"COCO_{one:012d}.png"} for one in ids]
    for image in images:
        picture(root / year / image["file_name"], image["id"])
    said = [
        {"id": 10 * one + place, "image_id": one, "caption": f"A {COLOURS[place]} thing {one}.\n"}
        for place in range(5)
        for one in reversed(ids)
    ]
    path = root / f"captions_{year}.json"
    path.write_text(json.dumps({"images": images, "annotations": said}), encoding="utf-8")
    return path


def split_file(root, name: str, folder: str):
    """The same of Karpathy's."""
    splits = ("train", "restval", "val", "test")
    images = []
    for number in range(16):
        file = f"{number:04d}.png"
        picture(root / folder / file, number)
        raw = [{"raw": f"picture {number} wording {place}"} for place in range(6)]
        image = {"filename": file, "split": splits[number % 4], "sentences": raw}
        images.append(image | ({"filepath": folder} if folder else {}))
    path = root / name
    path.write_text(json.dumps({"images": images, "dataset": "x"}), encoding="utf-8")
    return path


def spoken(data: Prepared, split: str, image: int, place: int) -> str:
    words = tokenizer_in(data.folder, data.task).vocabulary
    tokens = getattr(data, split).labels[image, place]
    return " ".join(words[token] for token in tokens if token > 2)


def prepared(settings, folder) -> Prepared:
    before = settings.preview()
    assert before.problem is None
    settings.prepare(folder)
    data = Prepared.open(folder, verify=True)
    assert data.card["images"] == before.images and before.task == data.task
    return data


def test_coco_by_its_annotations(tmp_path):
    files = coco(tmp_path), coco(tmp_path, 5, "val2014", first=100)
    settings = CocoCaptions(
        root=str(tmp_path), annotations=tuple(map(str, files)), size=8, context=10, test=0.2
    )
    data = prepared(settings, tmp_path / "out")
    assert data.card["images"] == {"train": 18, "validation": 2, "test": 5}
    for split in ("train", "test"):
        part = getattr(data, split)
        for image in range(len(part.labels)):
            words = [spoken(data, split, image, place).split() for place in range(5)]
            number = words[0][-2]  # "a red thing 7 ."
            assert [one[1] for one in words] == list(COLOURS)
            if split == "train":
                assert {one[-2] for one in words} == {number}
                assert part.images[image, 0, 4, 4] == int(number) * 9 % 256
    again = CocoCaptions.model_validate(settings.model_dump() | {"seed": 1})
    assert not np.array_equal(prepared(again, tmp_path / "more").test.images, data.test.images)


@pytest.mark.parametrize("kind", ["coco", "flickr"])
def test_karpathys_split(tmp_path, kind):
    folder = "val2014" if kind == "coco" else ""
    path = split_file(tmp_path, f"dataset_{kind}.json", folder)
    source = CocoCaptions if kind == "coco" else Flickr30k
    data = prepared(
        source(root=str(tmp_path), karpathy=str(path), size=8, context=8), tmp_path / "out"
    )
    # restval is training; of six sentences the first five count
    assert data.card["images"] == {"train": 8, "validation": 4, "test": 4}
    # 7, 11 and 15 are in no training caption; 3 numbers a wording there
    assert data.card["counts"]["test"] == {"captions": 20, "cut": 0, "unknown": 3 * 5}
    assert spoken(data, "train", 1, 4) == "picture 1 wording 4"
    assert data.train.images[1, 0, 0, 0] == 9


def token_file(root, lines=None):
    for number in range(10):
        picture(root / f"{number}.png", number)
    if lines is None:
        lines = [f"{n}.png#{k}\tA man {COLOURS[k]} ." for n in range(10) for k in range(5)]
    path = root / "results.token"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_flickrs_token_file(tmp_path):
    settings = Flickr30k(
        root=str(tmp_path), captions_file=str(token_file(tmp_path)), size=8, context=5
    )
    data = prepared(settings, tmp_path / "out")
    assert data.card["images"] == {"train": 8, "validation": 1, "test": 1}
    # a man red . are four words; three have room
    assert data.card["counts"]["test"] == {"captions": 5, "cut": 5, "unknown": 0}
    assert spoken(data, "test", 0, 1) == "a man green"


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            ["0.png#0\tfine", "1.png\tno number"],
            r"token:2: found '1.png\\tno number'; allowed: name",
        ),
        (["0.png#0 no tab"], r"token:1: found '0.png#0 no tab'; allowed: name.jpg#0, a tab"),
        (["0.png#0\tone", "0.png#0\ttwo"], "token:2: 0.png#0 is there twice"),
        (["../0.png#0\tout"] * 1 + [f"{n}.png#0\tx" for n in range(9)], "leads out of this folder"),
        ([f"{n}.png#0\tx" for n in range(12)], "1 images with captions are not there|2 images"),
    ],
)
def test_odd_token_files_are_refused(tmp_path, lines, says):
    path = token_file(tmp_path, lines)
    settings = Flickr30k(
        root=str(tmp_path), captions_file=str(path), size=8, test=0.3, validation=0.3
    )
    assert settings.preview().problem is not None
    with pytest.raises(UserError, match=says):
        settings.prepare(tmp_path / "out")


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda c: c["annotations"].clear(), "COCO_000000000000.png: has no caption"),
        (lambda c: c["images"].pop(), "found a caption of image 19, which is not listed"),
        (lambda c: c["images"].append(c["images"][3]), "the image id 3 is there twice"),
        (lambda c: c.pop("images"), "no captions of COCO's: lacks or has an odd 'images'"),
        (lambda c: c["images"][0].pop("file_name"), "lacks or has an odd 'file_name'"),
        (
            lambda c: c["images"][0].update(file_name="../../../etc/passwd"),
            "leads out of this folder",
        ),
    ],
)
def test_odd_annotations_are_refused(tmp_path, edit, says):
    path = coco(tmp_path)
    content = json.loads(path.read_text(encoding="utf-8"))
    edit(content)
    path.write_text(json.dumps(content), encoding="utf-8")
    settings = CocoCaptions(
        root=str(tmp_path), annotations=(str(path),), folders=("train2014",), size=8
    )
    with pytest.raises(UserError, match=says):
        settings.prepare(tmp_path / "out")
    assert says.split()[-1] in str(settings.preview().problem)


def test_files_that_are_none_are_named(tmp_path):
    torn = tmp_path / "captions_train2014.json"
    torn.write_text("[1", encoding="utf-8")
    one = {"root": str(tmp_path), "folders": ("train2014",)}
    with pytest.raises(UserError, match=r"captions_train2014\.json: not valid JSON"):
        CocoCaptions(**one, annotations=(str(torn),)).read()
    torn.write_bytes(b"\xff\xfe{}")
    with pytest.raises(UserError, match=r"captions_train2014\.json: not UTF-8"):
        CocoCaptions(**one, annotations=(str(torn),)).read()
    with pytest.raises(UserError, match="give `annotations` or `karpathy`, one of them"):
        CocoCaptions(**one).read()
    with pytest.raises(UserError, match="found 1 annotations and 2 folders; allowed: as many"):
        CocoCaptions(root=str(tmp_path), annotations=(str(torn),)).read()
    with pytest.raises(UserError, match=r"dataset\.json: no such file; fetch the annotations"):
        CocoCaptions(root=str(tmp_path), karpathy=str(tmp_path / "dataset.json")).read()


def test_a_link_that_leads_out_is_refused(tmp_path):
    outside = tmp_path / "secret.png"
    picture(outside, 1)
    root = tmp_path / "images"
    path = token_file(root)
    (root / "0.png").unlink()
    (root / "0.png").symlink_to(outside)
    settings = Flickr30k(root=str(root), captions_file=str(path), size=8)
    with pytest.raises(UserError, match="found the image '0.png', which leads out"):
        settings.prepare(tmp_path / "out")
