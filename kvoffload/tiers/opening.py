"""Opening one file of a set: its folder, owner, lock, and what it is."""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from typing import NamedTuple

from kvoffload.tiers.files import PAGE, FileOperations, OpenFile
from kvoffload.tiers.format import MAGIC, SUPERBLOCK_BYTES, SUPERBLOCK_OFFSETS, VERSION, Superblock
from kvoffload.tiers.member import read_superblocks, write_superblocks


class State(enum.Enum):
    """What is found at the path of a member."""

    VALID = "valid"
    MISSING = "missing"
    BLANK = "blank"  # empty, or zeros in a file of the size that is wanted
    OTHER_VERSION = "of another version"
    DAMAGED = "damaged or half made"  # no superblock has its checksum
    FOREIGN = "not a file of a disk tier"


class Found(NamedTuple):
    """What is found at a path: the open file unless it is MISSING, the newest superblock if it is VALID."""

    path: str
    state: State
    file: OpenFile | None
    superblock: Superblock | None


def check_paths(paths: Sequence[str]) -> None:
    """Raise unless these are different files in folders that are trusted.

    Raises:
        ValueError: two paths are the same file.
        PermissionError: a folder is a symbolic link; or every user may write it, and remove files of others.
        OSError: there is no such folder.
    """
    real = [os.path.realpath(path) for path in paths]
    for place, path in enumerate(real):
        if path in real[:place]:
            raise ValueError(f"paths[{place}] must be a file of its own, got {paths[place]!r}, which was given before")
    for path in paths:
        folder = os.path.dirname(os.path.abspath(path))
        status = os.lstat(folder)
        if stat.S_ISLNK(status.st_mode):
            raise PermissionError(
                errno.EPERM, f"the folder is a symbolic link; give the path it leads to, {os.path.realpath(folder)}",
                folder,
            )  # fmt: skip
        sticky = status.st_mode & stat.S_ISVTX and status.st_uid in (os.geteuid(), 0)
        if status.st_mode & stat.S_IWOTH and not sticky:
            raise PermissionError(
                errno.EPERM, "every user may write the folder; use another one, or chmod o-w this one", folder
            )


def find(path: str, operations: FileOperations, wanted: Superblock, *, writes: bool) -> Found:
    """Open and lock the file at `path`, if there is one, and see what it is.

    Args:
        wanted: its size decides what is blank to a writer.

    Raises:
        BlockingIOError: another process has it open for writing, and `writes`.
        PermissionError: it belongs to another user, or others may read or write it, or may have put it there.
        ValueError: it is no regular file.
        OSError: it cannot be opened or read.
    """
    access = os.O_RDWR if writes else os.O_RDONLY
    try:
        file = OpenFile(path, operations, access | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return Found(path, State.MISSING, None, None)
    try:
        _check_file(file)
        if writes:
            lock(file)
        state, superblock = _state_of(file, wanted, writes=writes)
    except BaseException:
        file.close()
        raise
    return Found(path, state, file, superblock)


def create(path: str, operations: FileOperations) -> OpenFile:
    """Create and lock an empty file that only this user may read and write."""
    file = OpenFile(path, operations, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
    try:
        lock(file)
    except BaseException:
        file.close()
        raise
    return file


def lock(file: OpenFile) -> None:
    """Make this process the only writer of a file until it is closed."""
    try:
        file.operations.flock(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(
            error.errno,
            "another process, or another object of this one, has the file open for writing; close that first, give "
            "another path, or open it with read_only=True",
            file.path,
        ) from None


def _check_file(file: OpenFile) -> None:
    status = file.operations.fstat(file.descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"path must be a regular file, or none yet, got {file.path!r}")
    everyone = os.stat(os.path.dirname(os.path.abspath(file.path))).st_mode & stat.S_IWOTH
    theirs = status.st_uid not in ((os.geteuid(),) if everyone else (os.geteuid(), 0))
    if theirs or stat.S_IMODE(status.st_mode) & 0o077 or (everyone and status.st_nlink != 1):
        raise PermissionError(
            errno.EPERM,
            "the file must be this user's with mode 600, under one name if every user may write the folder, and has "
            f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o} and {status.st_nlink} names; its content "
            "decides what the model continues from. chown and chmod 600 it if you trust it",
            file.path,
        )


def _state_of(file: OpenFile, wanted: Superblock, *, writes: bool) -> tuple[State, Superblock | None]:
    """The state of a file; a writer heals it: a copy of the superblock that is not the newest one is written again."""
    copies = read_superblocks(file)
    valid = [each for each in copies if each is not None]
    if valid:
        newest = max(valid, key=lambda each: each.epoch)
        if writes and copies != [newest] * len(copies):
            write_superblocks(file, newest)
        return State.VALID, newest
    starts = [_beginning(file, offset) for offset in SUPERBLOCK_OFFSETS]
    if not any(map(any, starts)):
        return State.BLANK if not writes or _is_blank(file, wanted) else State.FOREIGN, None
    known = [start for start in starts if start and MAGIC.startswith(start[: len(MAGIC)])]  # a file may be cut off
    if not known:
        return State.FOREIGN, None
    versions = {int.from_bytes(start[8:12], "little") for start in known if len(start) >= SUPERBLOCK_BYTES}
    return (State.OTHER_VERSION if versions - {VERSION} else State.DAMAGED), None


def _is_blank(file: OpenFile, wanted: Superblock) -> bool:
    """Whether a writer may format it: it is empty; or of the size that is wanted, and zeros up to the payloads."""
    if file.nbytes != wanted.file_bytes:
        return file.nbytes == 0
    return not any(_beginning(file, offset).strip(b"\0") for offset in range(0, wanted.data_offset, PAGE))


def _beginning(file: OpenFile, offset: int) -> bytes:
    """A page, or as much of it as there is."""
    size = max(0, min(PAGE, file.nbytes - offset))
    data = bytearray(size)
    file.read([memoryview(data)], offset)
    return bytes(data)
