"""Files in the user's cache folder: compiled kernels and measured profiles. All of them can be made again."""

from __future__ import annotations

import os
import tempfile
import warnings
from pathlib import Path

from kvoffload.errors import KVOffloadWarning

FOLDER_VARIABLE = "KVOFFLOAD_CACHE"

_warned: set[str] = set()


def cache_folder() -> Path:
    """Where the files are: the environment variable KVOFFLOAD_CACHE, or the user's cache folder. It may not exist."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen)
    import platformdirs

    return platformdirs.user_cache_path("kvoffload")


def read(path: Path) -> bytes | None:
    """What a file holds, or None if there is none that can be read. It may be anything: check it."""
    try:
        return path.read_bytes()
    except OSError:
        return None


def write(path: Path, content: bytes) -> bool:
    """Write a file whole or not at all, whoever else writes it; False, with one warning a process, if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, content)
    except OSError as error:
        warn_once(
            f"{path.parent} cannot be written ({error.strerror}): compiled kernels and profiles are not kept, and are "
            f"made again each time; set the environment variable {FOLDER_VARIABLE} to a folder that can",
            cause="unwritable cache folder",
        )
        return False
    return True


def why_not_writable() -> str | None:
    """Why nothing can be kept in the cache folder, or None if something can: tried with an empty file."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror


def warn_once(text: str, *, cause: str) -> None:
    """Warn, unless this process has warned about `cause` before."""
    if cause not in _warned:
        _warned.add(cause)
        warnings.warn(text, KVOffloadWarning, stacklevel=2)


def _replace(path: Path, content: bytes) -> None:
    """In the same folder, since a file system replaces only its own files in one step."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem[:16]}.", suffix=".part")
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
