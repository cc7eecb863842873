"""The explorer's page keeps its limit: fewer images and patches, then fewer models."""

import re

import numpy as np
import pytest

from moecore.core.encoded_arrays import decode_compressed_text, encode_arrays
from moecore.measure.explorer import Result as Explorer
from moecore.report.page import explorer_page, explorer_size
from moecore.report.page.explorer_page import LEFT_OUT, TOO_LARGE, explorer
from moecore.report.page.explorer_size import KeptShare, thin_trace
from tests.report.explored import study, two_seeds
from tests.report.test_figures import data_of


@pytest.mark.parametrize(("is_wide", "numbers"), [(False, "<u1"), (True, "<u2")])
def test_images_of_a_trace_by_hand(is_wide, numbers):
    """Three images of two tokens, two experts of a token; the first and the third are kept."""
    best = np.array([[0, 1], [1, 1], [1, 0]], numbers)
    experts = np.stack([best, 1 - best], axis=-1)
    marks = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    packed = encode_arrays(best, experts, marks)
    trace = {"answers": [[7], [8], [9]], "values": [[0.7], [0.8], [0.9]], "layers": [packed]}
    thin = thin_trace(trace, 2, [is_wide], [0, 2])
    assert thin["answers"] == [[7], [9]] and thin["values"] == [[0.7], [0.9]]
    data = decode_compressed_text(thin["layers"][0])
    assert data == b"".join(
        np.array(one, kind).tobytes()
        for one, kind in (
            ([0, 1, 1, 0], numbers),
            ([0, 1, 1, 0, 1, 0, 0, 1], numbers),
            ([0, 1, 2, 3, 8, 9, 10, 11], "u1"),
        )
    )


def test_what_is_kept_shrinks_to_a_limit():
    """Of 3 MB; 4 MB leave 3/4, hardly more than 3 MB 9/10, 30 MB 1/4: then models."""
    first = KeptShare(1.0, 20)
    assert [first.shrink(size).share for size in (4_000_000, 3_000_001, 30_000_000)] == (
        pytest.approx([0.75, 0.9, 0.25])
    )
    least = first._replace(share=0.25)
    assert least.shrink(4_000_000) == (0.25, 15) and least.shrink(3_000_001) == (0.25, 19)
    assert [first.number(24), first._replace(share=0.3).number(24)] == [24, 8]


def limited(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    for file in (explorer_size, explorer_page):
        monkeypatch.setattr(file, "MOST_BYTES", most)


def test_a_page_that_is_too_large_shows_fewer_images(monkeypatch):
    """The kept ones are those of the whole page; it says how many they are."""
    found = study()
    whole = data_of(explorer(found))
    limited(monkeypatch, len(explorer(found)) * 3 // 4)
    page = explorer(found)
    assert len(page.encode()) <= explorer_page.MOST_BYTES
    result = found.phases["pretrain"].first(Explorer)["vmoe"]
    shown, images = map(int, re.search(r"it shows (\d+) of (\d+) images", page).groups())
    assert 0 < shown < images == len(result.images)
    data = data_of(page)
    many, few = (one["phases"][0]["methods"][2]["model"] for one in (whole, data))
    places = [many["images"].index(image) for image in few["images"]]
    assert len(places) == shown and few["labels"] == [many["labels"][place] for place in places]
    sides = zip(many["shown"], few["shown"], strict=True)
    for before, after in sides:
        values = [before["trace"]["values"][place] for place in places]
        assert after["trace"]["values"] == values
        if before["picture"]:
            pixels = [pixels_of(one, of["picture"]) for one, of in ((whole, before), (data, after))]
            assert (pixels[1] == pixels[0][places]).all()
    for before, after in zip(many["layers"], few["layers"], strict=True):
        crops = pixels_of(whole, before["crops"]), pixels_of(data, after["crops"])
        rows, first = [], 0
        for all_of, some_of in zip(before["experts"], after["experts"], strict=True):
            number = len(some_of["favourites"])
            assert some_of["favourites"] == all_of["favourites"][:number]
            rows += range(first, first + number)
            first += len(all_of["favourites"])
        assert (crops[1] == crops[0][rows]).all()


def pixels_of(data: dict, picture: dict) -> np.ndarray:
    packed = decode_compressed_text(data["pool"][picture["pixels"]])
    return np.frombuffer(packed, np.uint8).reshape(picture["shape"])


def test_further_seeds_are_left_out_first_and_at_last_all(monkeypatch):
    found = two_seeds()
    for most, left in ((75_000, True), (1, False)):
        limited(monkeypatch, most)
        page = explorer(found)
        if left:
            (methods,) = [phase["methods"] for phase in data_of(page)["phases"]]
            assert len(page.encode()) <= most
            assert methods[-1] == {"name": "vmoe seed 1", "reason": LEFT_OUT}
            assert "model" in methods[0]
        else:
            assert TOO_LARGE in page and "<script" not in page
