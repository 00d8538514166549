"""The files of a set together: do they belong together, and is the set opened, created, refused or formatted again?

There are six cases:

1. All files are valid members of the wanted set: it is opened.
2. No file exists, or all existing ones are blank: a set is created.
3. A file is blank, damaged, half made or of another version, and the others are of the wanted set: a writer formats the
   set again, a reader sees an empty one.
4. A valid member is not of the wanted set, or a file is missing while others are valid: refused, unless `reset`.
5. Case 4 with `reset`: a writer formats the files again.
6. A file is something else: refused, even with `reset`.

Formatting leaves case 1, 2 or 3 after a crash: first the magic alone replaces superblocks, so that a file of any size
is known as ours; then space is allocated and synced; then superblocks are written. The new set has another id, so
headers from before are invalid.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from kvoffload.errors import CapacityError
from kvoffload.internal.log import LOGGER
from kvoffload.tiers.files import PAGE, FileOperations, OpenFile
from kvoffload.tiers.format import (
    DIGEST_BYTES,
    MAGIC,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_OFFSETS,
    UNFINISHED,
    VERSION,
    Superblock,
)
from kvoffload.tiers.member_file import read_superblocks, write_superblocks
from kvoffload.tiers.refusals import NO_ROOM

_NAMES = {
    "layout_digest": "the digest of the layout (dtype, axes, bytes of planes)",
    "slot_bytes": "the size of a record, in bytes,",
    "members": "the number of files in its set",
    "set_bytes": "the size of all files together, in bytes,",
}

Opened = list[tuple[OpenFile, Superblock]]  # by number of the member


class FileState(enum.Enum):
    VALID = "valid"
    MISSING = "missing"
    BLANK = "blank"  # empty, or zeros in a file of the wanted size
    OTHER_VERSION = "of another version"
    DAMAGED = "damaged or half made"  # no superblock has its checksum
    FOREIGN = "not a file of a disk tier"


class FoundFile(NamedTuple):
    """A member's path, the open file unless it is MISSING, and the newest superblock if it is VALID."""

    path: str
    state: FileState
    file: OpenFile | None
    superblock: Superblock | None


def file_at(path: str | Path) -> str:
    """Return the path of a file, with `~` expanded. A folder stands for the file `kvoffload` in it."""
    expanded = os.path.expanduser(path)
    return os.path.join(expanded, "kvoffload") if os.path.isdir(expanded) or expanded.endswith("/") else expanded


def check_paths(paths: Sequence[str]) -> None:
    """Raise unless these are different files in folders that other users cannot change.

    Raises:
        ValueError: two paths are the same file.
        PermissionError: a folder or file is a symbolic link, or every user may write it and remove other users' files.
        FileNotFoundError, OSError: there is no such folder.
    """
    real = [os.path.realpath(path) for path in paths]
    for place, path in enumerate(real):
        if path in real[:place]:
            raise ValueError(f"each file of a disk must be another one, got {paths[place]!r} twice")
    for path in paths:
        folder = os.path.dirname(os.path.abspath(path))
        try:
            status = os.lstat(folder)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, f"there is no such folder: mkdir -p {folder}", folder) from None
        for link in filter(os.path.islink, (folder, path)):
            raise PermissionError(
                errno.EPERM, f"it is a symbolic link; give the path it leads to, {os.path.realpath(link)}", link
            )
        sticky = status.st_mode & stat.S_ISVTX and status.st_uid in (os.geteuid(), 0)
        if status.st_mode & stat.S_IWOTH and not sticky:
            raise PermissionError(
                errno.EPERM, "every user may write the folder; use another one, or chmod o-w this one", folder
            )


def open_set(
    paths: Sequence[str],
    wanted: Superblock,
    operations: FileOperations,
    undo: ExitStack,
    *,
    reset: bool,
    read_only: bool,
) -> Opened:
    """Open the members of a set, or create them. Returns [] if there is nothing for a reader. Raises as `SlotFiles`.

    Args:
        wanted: the superblock of member 0. Epoch and set id do not matter, nor with `read_only` the number of slots.
        undo: gets callbacks that close the files.
    """
    check_paths(paths)
    found: list[FoundFile] = []
    for path in paths:
        found.append(_find(path, operations, wanted, writes=not read_only))
        if (file := found[-1].file) is not None:
            undo.callback(file.close)
    for each in found:
        if each.state is FileState.FOREIGN:
            raise ValueError(f"{each.path} is not a file of a disk tier; give another path, or delete it yourself")
    differs = _difference(found, wanted, any_size=read_only)
    if differs and (read_only or not reset):
        anew = f", or begin anew: delete {', '.join(paths)}, or give tiers=[DiskTier(..., reset=True)]"
        raise ValueError(f"{differs}: give the same as then, or another path{'' if read_only else anew}")
    members = [(each.file, each.superblock) for each in found if each.file and each.superblock]
    if not differs and len(members) == len(found):
        if not read_only:
            for file, superblock in members:
                _allocate(file, superblock.file_bytes)
        return sorted(members, key=lambda each: each[1].member)
    if read_only:
        for each in found:
            if each.state is FileState.MISSING:
                raise FileNotFoundError(errno.ENOENT, "there is no such file; a writer creates it", each.path)
        LOGGER.warning("the disk set is read as an empty cache: %s", _described(found))
        return []
    return _format(found, wanted, operations, undo)


def _described(found: Sequence[FoundFile]) -> str:
    return ", ".join(f"{each.path} is {each.state.value}" for each in found)


def _difference(found: Sequence[FoundFile], wanted: Superblock, *, any_size: bool) -> str | None:
    members = [(each.path, each.superblock) for each in found if each.superblock is not None]
    for path, superblock in members:
        if (superblock.algorithm, superblock.key_check) != (wanted.algorithm, wanted.key_check):
            return f"{path} was written with another checksum key, or without one"
        if superblock.identity_digest != wanted.identity_digest:
            theirs, ours = (repr(each.identity_text.decode("utf-8", "replace")) for each in (superblock, wanted))
            return f"{path} was written for identity {theirs}, and this call wants {ours}"
        for name, shown in _NAMES.items():
            there, here = getattr(superblock, name), getattr(wanted, name)
            if there != here and not (any_size and name == "set_bytes"):
                there, here = (each.hex() if isinstance(each, bytes) else each for each in (there, here))
                return f"{path}: {shown} was {there}, and this call wants {here}"
    for each in found:
        if each.state is FileState.MISSING and members:
            return f"{each.path} is missing, and other files of its set are there"
    if len(members) == len(found):
        numbers = set[int]()
        for path, superblock in members:
            if superblock.set_id != members[0][1].set_id or superblock.member in numbers:
                return f"{path} belongs to another set than {members[0][0]}"
            numbers.add(superblock.member)
    return None


# one file -------------------------------------------------------------------------------------------------------------


def _find(path: str, operations: FileOperations, wanted: Superblock, *, writes: bool) -> FoundFile:
    """Open the file at `path`, if there is one, lock it if this process `writes`, and tell its state."""
    access = os.O_RDWR if writes else os.O_RDONLY
    try:
        file = OpenFile(path, operations, access | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return FoundFile(path, FileState.MISSING, None, None)
    try:
        status = operations.fstat(file.descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is no regular file: give another path")
        everyone = os.stat(os.path.dirname(os.path.abspath(path))).st_mode & stat.S_IWOTH
        theirs = status.st_uid not in ((os.geteuid(),) if everyone else (os.geteuid(), 0))
        if theirs or stat.S_IMODE(status.st_mode) & 0o077 or (everyone and status.st_nlink != 1):
            raise PermissionError(
                errno.EPERM,
                f"the file has owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o} and {status.st_nlink} "
                "names; it must belong to this user with mode 600, and have one name if every user may write the "
                "folder, because the model continues from its bytes. If you trust it, chown and chmod 600 it",
                path,
            )
        if writes:
            _lock(file)
        state, superblock = _state_of(file, wanted, writes=writes)
        return FoundFile(path, state, file, superblock)
    except BaseException:
        file.close()
        raise


def _lock(file: OpenFile) -> None:
    try:
        file.operations.flock(file.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(
            error.errno,
            "another process, or another object of this one, has the file open for writing; close that first, give "
            "another path, or only read it: tiers=[DiskTier(..., read_only=True)]",
            file.path,
        ) from None


def _state_of(file: OpenFile, wanted: Superblock, *, writes: bool) -> tuple[FileState, Superblock | None]:
    """Tell the state of a file. A writer replaces a copy of the superblock that is not the newest one."""
    copies = read_superblocks(file)
    valid = [each for each in copies if each is not None]
    if valid:
        newest = max(valid, key=lambda each: each.epoch)
        if writes and copies != [newest] * len(copies):
            write_superblocks(file, newest)
        return FileState.VALID, newest
    starts = [_beginning(file, offset) for offset in SUPERBLOCK_OFFSETS]
    if not any(map(any, starts)):
        # A writer may format it if it is empty, or of the wanted size with zeros up to the payloads.
        blank = not writes or file.nbytes == 0
        if not blank and file.nbytes == wanted.file_bytes:
            table = range(0, wanted.data_offset, PAGE)
            blank = not any(_beginning(file, offset).strip(b"\0") for offset in table)
        return FileState.BLANK if blank else FileState.FOREIGN, None
    known = [start for start in starts if start and MAGIC.startswith(start[: len(MAGIC)])]  # a file may be cut off
    if not known:
        return FileState.FOREIGN, None
    versions = {int.from_bytes(start[8:12], "little") for start in known if len(start) >= SUPERBLOCK_BYTES}
    return (FileState.OTHER_VERSION if versions - {VERSION} else FileState.DAMAGED), None


def _beginning(file: OpenFile, offset: int) -> bytes:
    size = max(0, min(PAGE, file.nbytes - offset))
    data = bytearray(size)
    file.read([memoryview(data)], offset)
    return bytes(data)


# creating -------------------------------------------------------------------------------------------------------------


def _format(found: Sequence[FoundFile], wanted: Superblock, operations: FileOperations, undo: ExitStack) -> Opened:
    if not {each.state for each in found} <= {FileState.MISSING, FileState.BLANK}:
        LOGGER.warning("the disk set is formatted again, its records are gone: %s", _described(found))
    set_id = secrets.token_bytes(DIGEST_BYTES)
    files: list[OpenFile] = []
    with ExitStack() as created:
        for each in found:
            if each.file is None:
                only_this_user = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
                files.append(OpenFile(each.path, operations, only_this_user))
                undo.callback(files[-1].close)
                _lock(files[-1])
                created.callback(operations.unlink, each.path)
            else:
                files.append(each.file)
        for file in files:  # none of any set, before anything else is changed
            for offset in SUPERBLOCK_OFFSETS:
                file.write([memoryview(UNFINISHED)], offset)
            file.sync()
        for file in files:
            _allocate(file, wanted.file_bytes)
            operations.fsync(file.descriptor)
        for folder in {os.path.dirname(os.path.abspath(file.path)) for file in files}:
            names = OpenFile(folder, operations, os.O_RDONLY | os.O_DIRECTORY)
            try:
                operations.fsync(names.descriptor)  # of new files
            finally:
                names.close()
        opened = [(file, wanted._replace(set_id=set_id, member=number)) for number, file in enumerate(files)]
        for file, superblock in opened:
            write_superblocks(file, superblock)
        created.pop_all()
    return opened


def _allocate(file: OpenFile, nbytes: int) -> None:
    """Give a file exactly its space now, so that no later write runs out of space."""
    try:
        file.operations.fallocate(file.descriptor, nbytes)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise CapacityError(
            f"{file.path} needs {nbytes} bytes, which cannot be allocated ({error.strerror}): make the disk "
            "smaller, or free space"
        ) from None
    if file.nbytes > nbytes:
        file.operations.ftruncate(file.descriptor, nbytes)
