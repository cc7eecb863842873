"""Fetch a public file whole and checked, or not at all."""

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from moecore.core.files import UserError, checksum, room_for, whole_file

BLOCK = 1 << 20
TIMEOUT = 60.0  # seconds without any byte
DIGITS = 20  # of a number of bytes: Python reads no number of thousands
LARGEST = 1 << 30  # bytes; the largest file fetched here, CIFAR-10, has 163 MiB


def check_digest(path: Path, algorithm: str, expected: str, url: str) -> None:
    """Raise UserError where the file's digest differs from the published one."""
    found = checksum(path, algorithm)
    if found != expected:
        raise UserError(
            f"{url}: the downloaded file has {algorithm} {found}; published: {expected}. Try "
            "again, or fetch it by hand"
        )


def fetch(url: str, path: str | Path, check: Callable[[Path], None]) -> None:
    """Download ``url`` to ``path``; the file appears only after ``check(temporary path)`` has
    accepted it.

    Raises UserError on other schemes than http(s), on any network problem (naming the URL), on more
    than ``LARGEST`` bytes and from ``check``.
    """
    if not url.startswith(("https://", "http://")):
        raise UserError(f"{url}: cannot download; allowed: http:// and https:// addresses")
    with whole_file(path) as temporary:
        try:
            _stream(url, temporary)
        except (
            urllib.error.URLError,
            http.client.HTTPException,
            TimeoutError,
            ConnectionError,
            ValueError,  # of an address, which a redirection names: a word of it is too long
        ) as error:
            raise UserError(
                f"{url}: download failed ({error}); check the network, or put the file at {path} "
                "by hand"
            ) from error
        check(temporary)


def _stream(url: str, path: Path) -> None:
    with urllib.request.urlopen(url, timeout=TIMEOUT) as answer, open(path, "wb") as handle:
        promised = answer.headers.get("Content-Length", "")
        if promised.isdecimal() and len(promised) > DIGITS:
            found = f"promises a number of bytes with {len(promised)} digits"
            raise UserError(f"{url}: {found}; allowed: up to {LARGEST} bytes. Fetch it by hand")
        expected = int(promised) if promised.isdecimal() else None
        received = 0
        with room_for(path, expected, path):
            while received <= LARGEST >= (expected or 0) and (block := answer.read(BLOCK)):
                handle.write(block)
                received += len(block)
    if max(received, expected or 0) > LARGEST:
        found = f"{expected} bytes" if expected else f"more than {LARGEST} bytes"
        raise UserError(f"{url}: sends {found}; allowed: {LARGEST}. Fetch it by hand")
    if expected is not None and expected != received:
        raise UserError(
            f"{url}: download broke off; expected {expected} bytes, found {received}. Try again"
        )
