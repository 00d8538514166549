"""Cache files: only regular files are read, and nothing in their place blocks."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from kvoffload.internal import cachefiles

READERS = [cachefiles.read, partial(cachefiles.read, trusted=True)]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("reader", READERS)
def test_a_fifo_in_the_place_of_a_cache_file_is_no_file_and_does_not_block(tmp_path: Path, reader: object) -> None:
    fifo = tmp_path / "profile.json"
    os.mkfifo(fifo, 0o600)
    assert callable(reader)
    assert reader(fifo) is None
    writer = os.open(fifo, os.O_RDWR)  # one that a program writes to at this moment
    os.write(writer, b"{}")
    assert reader(fifo) is None
    os.close(writer)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("place", ["folder", "/dev/zero", "missing", "link to a fifo"])
def test_other_things_in_its_place_are_no_file(tmp_path: Path, reader: object, place: str) -> None:
    path = tmp_path / "file"
    if place == "folder":
        path.mkdir()
    elif place == "link to a fifo":
        os.mkfifo(tmp_path / "fifo")
        path.symlink_to(tmp_path / "fifo")
    elif place != "missing":
        path = Path(place)
    assert callable(reader)
    assert reader(path) is None


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_was_written_is_read(tmp_path: Path, reader: object) -> None:
    path = tmp_path / "new" / "file"
    assert cachefiles.write(path, b"content")
    assert callable(reader)
    assert reader(path) == b"content"


def test_a_fifo_is_replaced_by_a_file_when_it_is_written(tmp_path: Path) -> None:
    fifo = tmp_path / "file"
    os.mkfifo(fifo)
    assert cachefiles.write(fifo, b"content")
    assert cachefiles.read(fifo, trusted=True) == b"content"


def test_a_file_that_others_may_write_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    path.chmod(0o666)
    assert cachefiles.read(path) == b"content"
    assert cachefiles.read(path, trusted=True) is None
