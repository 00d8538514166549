"""Files in the user's cache folder: compiled kernels and measured profiles. All can be generated again."""

from __future__ import annotations

import contextlib
import os
import stat
import warnings
from pathlib import Path

from kvoffload.errors import KVOffloadWarning
from kvoffload.internal.log import LOGGER

FOLDER_VARIABLE = "KVOFFLOAD_CACHE"

warned: set[str] = set()  # the causes that `warn_once` has warned of in this process


def cache_folder() -> Path:
    """Return the folder in the environment variable KVOFFLOAD_CACHE, or the user's cache folder. It may not exist."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen)
    import platformdirs

    return platformdirs.user_cache_path("kvoffload")


def read(path: Path, *, trusted: bool = False) -> bytes | None:
    """Return the content of a regular file; None if it cannot be read. A FIFO or a device file never blocks.

    Args:
        trusted: the content will be trusted: None, too, unless the file belongs to the effective user or to root, and
            no other user may write it.
    """

    def open_file(name: str, flags: int) -> int:  # a FIFO without a writer would block the open; files do not notice
        return os.open(name, flags | os.O_NONBLOCK)

    try:
        with open(path, "rb", opener=open_file) as file:
            status = os.fstat(file.fileno())
            own = status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            return file.read() if stat.S_ISREG(status.st_mode) and (own or not trusted) else None
    except OSError:
        return None


def write(path: Path, content: bytes) -> bool:
    """Write a file whole or not at all, even if other processes write it, too. False if that fails, with one warning
    per process. Missing folders are created with access for this user only.
    """
    try:
        _make_folder(path.parent)
        _replace(path, content)
    except OSError as error:
        warn_once(
            f"{path.parent} cannot be written ({_reason(error)}): compiled kernels and profiles are not kept, and "
            f"are generated again each time; set the environment variable {FOLDER_VARIABLE} to a folder that can",
            cause="unwritable cache folder",
        )
        return False
    return True


def why_not_writable() -> str | None:
    """Return why no file can be written to the cache folder; None if an empty one can."""
    import tempfile  # takes 3 ms to import, with what it imports

    try:
        folder = cache_folder()
        _make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return _reason(error)


def warn_once(text: str, *, cause: str) -> None:
    """Warn, and log it, unless this process has warned about `cause` before."""
    if cause not in warned:
        warned.add(cause)
        LOGGER.warning("%s", text)
        warnings.warn(text, KVOffloadWarning, stacklevel=2)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _make_folder(folder: Path) -> None:
    """Create a folder and its missing parents: `Path.mkdir` would give the parents another mode."""
    if not folder.parent.exists():
        _make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def _replace(path: Path, content: bytes) -> None:
    """Write a temporary file next to `path` and rename it: that is one step only within a file system."""
    import tempfile

    prefix = f".{path.stem[:16]}."
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=prefix, suffix=".part", delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.name)
            raise
