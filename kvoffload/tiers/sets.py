"""The files of a set together: whether they are one, and when a set is created, refused, or formatted again.

There are six cases:

1. All files are valid members of the set that is wanted: it is opened.
2. No file exists, or those that exist are blank: a set is created.
3. A file is blank, damaged, half made or of another version, and the others agree with what is wanted: a writer formats
   the set again, a reader sees an empty one.
4. A valid member differs from what is wanted, or a file is missing while others are valid: refused, unless `reset`.
5. `reset`, and the files are not the set that is wanted: they are formatted again.
6. A file is something else: refused, also with `reset`.

A set is formatted so that a crash leaves case 1, 2 or 3: the magic alone replaces superblocks, so a file of any size
is known as ours; space is allocated and synced; superblocks are written. Headers of before are of another set then, as
the new one has another id.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack

from kvoffload.errors import CapacityError
from kvoffload.internal.log import LOGGER
from kvoffload.tiers.checksums import DIGEST_BYTES
from kvoffload.tiers.files import FileOperations, OpenFile, sync_folder
from kvoffload.tiers.format import SUPERBLOCK_OFFSETS, UNFINISHED, Superblock
from kvoffload.tiers.member import write_superblocks
from kvoffload.tiers.opening import Found, State, check_paths, create, find

_RESET = "give another path, or reset=True to lose what the files hold"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NAMES = {
    "layout_digest": "layout digest",
    "slot_bytes": "slot bytes",
    "members": "number of files in its set",
    "slots": "number of slots (which follows from nbytes)",
}

Opened = list[tuple[OpenFile, Superblock]]  # by number of the member


def open_set(
    paths: Sequence[str],
    wanted: Superblock,
    operations: FileOperations,
    undo: ExitStack,
    *,
    reset: bool,
    read_only: bool,
) -> Opened:
    """Open the members of a set, or create them; empty where there is nothing for a reader.

    Args:
        wanted: the superblock of member 0; its epoch and set id do not matter, and with `read_only` not its slots.
        undo: gets what closes the files.

    Raises:
        As `SlotFiles`.
    """
    check_paths(paths)
    found: list[Found] = []
    for path in paths:
        found.append(find(path, operations, wanted, writes=not read_only))
        if (file := found[-1].file) is not None:
            undo.callback(file.close)
    for each in found:
        if each.state is State.FOREIGN:
            raise ValueError(f"{each.path} is not a file of a disk tier; give another path, or delete it yourself")
    differs = _difference(found, wanted, any_size=read_only)
    if differs and (read_only or not reset):
        raise ValueError(f"{differs}; {_RESET}")
    members = [(each.file, each.superblock) for each in found if each.file and each.superblock]
    if not differs and len(members) == len(found):
        if not read_only:
            for file, superblock in members:
                _allocate(file, superblock.file_bytes)
        return sorted(members, key=lambda each: each[1].member)
    if read_only:
        return _nothing_to_read(found)
    return _format(found, wanted, operations, undo)


def _nothing_to_read(found: Sequence[Found]) -> Opened:
    for each in found:
        if each.state is State.MISSING:
            raise FileNotFoundError(errno.ENOENT, "there is no such file; a writer creates it", each.path)
    states = ", ".join(f"{each.path} is {each.state.value}" for each in found)
    LOGGER.warning("the disk set is read as an empty cache: %s", states)
    return []


def _difference(found: Sequence[Found], wanted: Superblock, *, any_size: bool) -> str | None:
    """How the valid members differ from one set that is wanted; None if they do not."""
    members = [(each.path, each.superblock) for each in found if each.superblock is not None]
    for path, superblock in members:
        differs = _member_difference(superblock, wanted, any_size=any_size)
        if differs:
            return f"{path} {differs}"
    for each in found:
        if each.state is State.MISSING and members:
            return f"{each.path} is missing, and other files of its set are there; bring it back"
    if len(members) == len(found):
        numbers = set[int]()
        for path, superblock in members:
            if superblock.set_id != members[0][1].set_id or superblock.member in numbers:
                return f"{path} belongs to another set than {members[0][0]}"
            numbers.add(superblock.member)
    return None


def _member_difference(superblock: Superblock, wanted: Superblock, *, any_size: bool) -> str | None:
    if (superblock.algorithm, superblock.key_check) != (wanted.algorithm, wanted.key_check):
        return "was written with another checksum key, or without one; give that key"
    if superblock.identity_digest != wanted.identity_digest:
        return f"was written for identity {_text(superblock)}, and this call wants {_text(wanted)}"
    for name, shown in _NAMES.items():
        there, here = getattr(superblock, name), getattr(wanted, name)
        if there != here and not (any_size and name == "slots"):
            there, here = (each.hex() if isinstance(each, bytes) else each for each in (there, here))
            return f"has {shown} {there}, and this call wants {here}"
    return None


def _text(superblock: Superblock) -> str:
    return repr(superblock.identity_text.decode("utf-8", "replace"))


# creating -------------------------------------------------------------------------------------------------------------


def _format(found: Sequence[Found], wanted: Superblock, operations: FileOperations, undo: ExitStack) -> Opened:
    """Make the files a new, empty set."""
    states = {each.state for each in found}
    if not states <= {State.MISSING, State.BLANK}:
        text = ", ".join(f"{each.path} is {each.state.value}" for each in found)
        LOGGER.warning("the disk set is formatted again, its records are gone: %s", text)
    set_id = secrets.token_bytes(DIGEST_BYTES)
    files: list[OpenFile] = []
    with ExitStack() as created:
        for each in found:
            if each.file is None:
                files.append(create(each.path, operations))
                undo.callback(files[-1].close)
                created.callback(operations.unlink, each.path)
            else:
                files.append(each.file)
        for file in files:
            _unmake(file)
        for file in files:
            _allocate(file, wanted.file_bytes)
            operations.fsync(file.descriptor)
        for folder in {os.path.dirname(os.path.abspath(file.path)) for file in files}:
            sync_folder(folder, operations)
        opened = [(file, wanted._replace(set_id=set_id, member=number)) for number, file in enumerate(files)]
        for file, superblock in opened:
            write_superblocks(file, superblock)
        created.pop_all()
    return opened


def _unmake(file: OpenFile) -> None:
    """Make a file none of any set, before anything else of it is changed."""
    for offset in SUPERBLOCK_OFFSETS:
        file.write([memoryview(UNFINISHED)], offset)
    file.sync()


def _allocate(file: OpenFile, nbytes: int) -> None:
    """Give a file all of its space now, so that no write fails for want of it, and none that it does not need."""
    try:
        file.operations.fallocate(file.descriptor, nbytes)
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise CapacityError(
            f"{file.path} needs {nbytes} bytes, which cannot be allocated ({error.strerror}); lower nbytes, or free "
            "space"
        ) from None
    if file.nbytes > nbytes:
        file.operations.ftruncate(file.descriptor, nbytes)
