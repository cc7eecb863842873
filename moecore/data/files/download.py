"""Fetch a public file whole and checked, or not at all."""

import http.client
import urllib.error
from collections.abc import Callable
from pathlib import Path

import torch

from moecore.core.files import UserError, file_checksum, whole_file


def check_digest(path: Path, algorithm: str, expected: str, source: str) -> None:
    """Raise UserError where the file's digest differs from the published one."""
    digest = file_checksum(path, algorithm)
    if digest != expected:
        raise UserError(
            f"{source}: has {algorithm} {digest}; published: {expected}. Fetch it again"
        )


def download_file(url: str, path: Path, check: Callable[[Path], object]) -> None:
    """Download ``url`` to ``path``, which appears only once ``check(temporary path)`` accepts it.

    Raises UserError on any network problem (naming the URL) and from ``check``.
    """
    with whole_file(path) as temporary:
        try:
            torch.hub.download_url_to_file(url, str(temporary), progress=False)
        except (
            urllib.error.URLError,
            http.client.HTTPException,
            TimeoutError,
            ConnectionError,
            ValueError,  # of an address, which a redirection names
        ) as error:
            raise UserError(
                f"{url}: download failed ({error}); check the network, or put the file at {path} "
                "by hand"
            ) from error
        check(temporary)
