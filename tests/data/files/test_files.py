"""IDX files: what is read is what was written; every kind of damage is one clear error.

Downloads against a server on this machine: whole and checked, or nothing.
"""

import functools
import gzip
import hashlib
import threading
import tracemalloc
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moecore.core.files import FullDisk, UserError, checksum
from moecore.core.inside import inside
from moecore.data.files import cifar_files, download
from moecore.data.files.download import check_digest, fetch
from moecore.data.files.idx import read_idx
from moecore.data.sources import fashion_mnist
from moecore.data.sources.cifar import Cifar
from moecore.data.sources.fashion_mnist import FashionMnist
from tests.data.making import fashion_folder, idx_bytes

IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


@given(
    arrays.arrays(np.uint8, arrays.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5)),
    st.booleans(),
)
def test_round_trip(tmp_path_factory, array, packed):
    path = tmp_path_factory.mktemp("idx") / "file"
    content = idx_bytes(array)
    path.write_bytes(gzip.compress(content) if packed else content)
    read = read_idx(path, array.ndim, hashlib.sha256(content).hexdigest())
    assert read.dtype == np.uint8 and np.array_equal(read, array)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "starts with nothing"),
        (
            b"\x00\x00\x0d\x03" + idx_bytes(IMAGES)[4:],
            "starts with 00 00 0d 03; allowed: 00 00 08 03",
        ),
        (idx_bytes(IMAGES[0]), "starts with 00 00 08 02"),
        (idx_bytes(IMAGES)[:10], "expected a header of 16 bytes, found 10"),
        (idx_bytes(IMAGES)[:-1], "expected 40 bytes (sizes (2, 3, 4) in its header), found 39"),
        (idx_bytes(IMAGES) + b"x", "expected 40 bytes (sizes (2, 3, 4) in its header), found more"),
        (b"\0\0\x08\x03" + b"\x80\0\0\0" * 2 + b"\0\0\0\4", "found 16; fetch"),  # 2^64 is 0
        (gzip.compress(idx_bytes(IMAGES), mtime=0)[:-9], "damaged or truncated gzip file"),
        (b"\x1f\x8b" + b"rubbish, not gzip at all", "damaged or truncated gzip file"),
    ],
)
def test_damage_is_named(tmp_path, content, said):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_idx(path, 3)
    assert str(path) in str(error.value) and said in str(error.value)


def test_a_small_file_that_unpacks_to_much_is_not_unpacked(tmp_path):
    path = tmp_path / "train-images-idx3-ubyte.gz"
    with gzip.open(path, "wb", 9) as handle:
        handle.write(idx_bytes(IMAGES))
        for _ in range(100):
            handle.write(bytes(1 << 20))
    tracemalloc.start()
    with pytest.raises(UserError, match="expected 40 bytes .* found more"):
        read_idx(path, 3)
    assert tracemalloc.get_traced_memory()[1] < 10 << 20
    tracemalloc.stop()
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="folder: cannot be read, is a directory"):
        read_idx(tmp_path / "folder", 3)


def test_other_checksum_and_missing_file(tmp_path):
    path = tmp_path / "images"
    path.write_bytes(idx_bytes(IMAGES))
    with pytest.raises(UserError, match="its content has sha256 .*; the published file has abc"):
        read_idx(path, 3, "abc")
    with pytest.raises(UserError, match="absent: no such file"):
        read_idx(tmp_path / "absent", 3)


class Handler(BaseHTTPRequestHandler):
    """Serves the files of ``folder``; /short promises more than it sends, /odd no number, and
    /endless does not end.
    """

    def __init__(self, folder, *args):
        self.folder = folder
        super().__init__(*args)

    def do_GET(self):
        path = self.folder / self.path.lstrip("/")
        if self.path in ("/short", "/odd", "/huge", "/digits", "/endless"):
            content = b"half"
        elif path.is_file():
            content = path.read_bytes()
        else:
            content = None
        self.send_response(404 if content is None else 200)
        told = {"/short": "100", "/odd": "many", "/huge": str(1 << 40), "/digits": "9" * 5000}
        told["/endless"] = None
        length = told.get(self.path, str(len(content or b"")))
        if length is not None:
            self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(content or b"")
        try:
            while self.path == "/endless":
                self.wfile.write(bytes(1 << 16))
        except ConnectionError:
            pass  # who asked has heard enough

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    http = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, folder))
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{http.server_port}/"
    http.shutdown()
    http.server_close()


def test_checked_and_whole(server, tmp_path):
    folder, url = server
    (folder / "file").write_bytes(b"content" * 1000)
    digest = hashlib.md5(b"content" * 1000).hexdigest()
    fetch(
        url + "file",
        tmp_path / "deep" / "file",
        lambda path: check_digest(path, "md5", digest, url),
    )
    assert checksum(tmp_path / "deep" / "file", "md5") == digest


def test_every_failure_leaves_nothing(server, tmp_path, monkeypatch):
    folder, url = server
    monkeypatch.setattr(download, "LARGEST", 1 << 20)
    (folder / "file").write_bytes(b"tampered with")
    for name, said in (
        ("file", "published: abc"),
        ("absent", "404"),
        ("short", "expected 100 bytes, found 4|IncompleteRead|download"),
        ("odd", "published: abc"),
        ("huge", "sends 1099511627776 bytes; allowed: 1048576"),
        ("digits", "promises a number of bytes with 5000 digits; allowed: up to 1048576"),
        ("endless", "sends more than 1048576 bytes; allowed: 1048576"),
    ):
        with pytest.raises(UserError, match=said):
            fetch(
                url + name,
                tmp_path / "here" / "file",
                lambda path: check_digest(path, "md5", "abc", url),
            )
    with pytest.raises(UserError, match="allowed: http:// and https://"):
        fetch("file:///etc/hostname", tmp_path / "here" / "file", lambda path: None)
    with pytest.raises(UserError, match="download failed"):
        fetch("http://127.0.0.1:9/closed", tmp_path / "here" / "file", lambda path: None)
    for address in (f"http://{'long' * 20}.org/", "http://[1:2/"):
        with pytest.raises(UserError, match=r"download failed \(.*\); check the network"):
            fetch(address, tmp_path / "here" / "file", lambda path: None)
    assert not list((tmp_path / "here").iterdir())


def test_a_download_without_room_says_what_it_takes(server, tmp_path, limited):
    folder, url = server
    (folder / "file").write_bytes(b"content" * 1000)
    place = tmp_path / "here" / "file"
    with limited(1000), pytest.raises(FullDisk) as error:
        fetch(url + "file", place, lambda path: None)
    said = f"{place}: could not be written, file too large: it takes 7,000 bytes; a file may have"
    assert str(error.value).startswith(said)
    assert not list((tmp_path / "here").iterdir())
    fetch(url + "file", place, lambda path: None)
    assert place.stat().st_size == 7000


def test_fashion_mnist_is_fetched_and_checked(server, tmp_path, monkeypatch):
    folder, url = server
    monkeypatch.setattr(fashion_mnist, "URL", url)
    monkeypatch.setattr(fashion_mnist, "SHA256", fashion_folder(folder))
    settings = FashionMnist(root=str(tmp_path / "raw"), download=True)
    card = settings.prepare(tmp_path / "out")
    assert (
        sum(card["counts"]["test"].values()) == 60 and len(list((tmp_path / "raw").iterdir())) == 4
    )
    monkeypatch.setattr(fashion_mnist, "URL", "http://127.0.0.1:9/")
    settings.prepare(tmp_path / "again")  # found on disk: no second download


def test_cifar_is_refused_where_the_checksum_differs(server, tmp_path, monkeypatch):
    folder, url = server
    (folder / "cifar-10-binary.tar.gz").write_bytes(np.random.default_rng(0).bytes(100))
    monkeypatch.setattr(cifar_files, "URL", url)
    with pytest.raises(UserError, match="has md5 .*; published: c32a1d4ab5d03f1284b67883e8d87530"):
        Cifar(root=str(tmp_path / "raw"), download=True).prepare(tmp_path / "out")
    assert not list((tmp_path / "raw").iterdir())


def test_a_relative_folder_is_not_put_before_its_files_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path("pictures/a.png")
    file.parent.mkdir()
    file.touch()
    assert inside(Path("pictures"), file) == inside(Path("pictures"), "a.png") == file
    assert inside(Path("."), file) == file
    with pytest.raises(UserError, match="which leads out of this folder"):
        inside(Path("pictures"), "../pictures/a.png")
