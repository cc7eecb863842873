"""IDX files: read as written, or one clear error; downloads: whole and checked, or nothing."""

import functools
import gzip
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from moecore.core.files import UserError, file_checksum, join_below_root
from moecore.data.files.published_source import check_digest, download_file
from moecore.data.sources import fashion_mnist
from moecore.data.sources.fashion_mnist import FashionMnist, read_idx
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
        (idx_bytes(IMAGES)[:-1], "its content has sha256"),
        (gzip.compress(idx_bytes(IMAGES))[:-9], "cannot be read"),
        (b"another file", "its content has sha256"),
        (gzip.compress(bytes(2**27), 1), "found more than 67,108,864 bytes"),
        (None, "No such file"),
    ],
    ids=["truncated", "truncated gzip", "foreign", "gzip of zeros", "missing"],
)
def test_damage_is_named(tmp_path, content, said):
    path = tmp_path / "train-images-idx3-ubyte"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_idx(path, 3, hashlib.sha256(idx_bytes(IMAGES)).hexdigest())
    assert str(error.value).startswith(f"{path}: ") and said in str(error.value)


class Handler(BaseHTTPRequestHandler):
    """Serves the files of ``folder``; /short promises more than it sends."""

    def __init__(self, folder, *args):
        self.folder = folder
        super().__init__(*args)

    def do_GET(self):
        path = self.folder / self.path.lstrip("/")
        content = path.read_bytes() if path.is_file() else None
        self.send_response(404 if content is None else 200)
        length = len(content or b"") + 100 * (self.path == "/short")
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(content or b"")

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
    download_file(
        url + "file",
        tmp_path / "deep" / "file",
        lambda path: check_digest(path, "md5", digest, url),
    )
    assert file_checksum(tmp_path / "deep" / "file", "md5") == digest


@pytest.mark.parametrize("name", ["file", "short", "absent"])
def test_every_failure_leaves_nothing(server, tmp_path, name):
    folder, url = server
    for file in ("file", "short"):
        (folder / file).write_bytes(b"tampered with")
    place = tmp_path / "here/file"
    with pytest.raises(UserError, match=f"{url}{name}: "):
        download_file(url + name, place, lambda path: check_digest(path, "md5", "abc", url + name))
    assert not list((tmp_path / "here").iterdir())


def test_fashion_mnist_is_fetched_and_checked(server, tmp_path, monkeypatch):
    folder, url = server
    monkeypatch.setattr(fashion_mnist, "URL", url)
    monkeypatch.setattr(fashion_mnist, "SHA256", fashion_folder(folder))
    settings = FashionMnist(root=str(tmp_path / "raw"), download=True)
    assert sum(settings.write(tmp_path / "out")["counts"]["test"].values()) == 60
    assert len(list((tmp_path / "raw").iterdir())) == 4
    monkeypatch.setattr(fashion_mnist, "URL", "http://127.0.0.1:9/")
    settings.write(tmp_path / "again")  # found on disk: no second download


def test_a_relative_folder_is_not_put_before_its_files_twice(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path("pictures/a.png")
    file.parent.mkdir()
    file.touch()
    assert (
        join_below_root(Path("pictures"), file)
        == join_below_root(Path("pictures"), "a.png")
        == file
    )
    assert join_below_root(Path("."), file) == file
    with pytest.raises(UserError, match="which leads out of this folder"):
        join_below_root(Path("pictures"), "../pictures/a.png")
