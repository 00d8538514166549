"""Files in the user's cache folder: compiled kernels and measured profiles. All of them can be made again."""

from __future__ import annotations

import contextlib
import os
import stat
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


def read_own(path: Path) -> bytes | None:
    """Like `read`, for what must not come from others: None unless the file belongs to the effective user or to root,
    and nobody else may write it.
    """
    try:
        with path.open("rb") as file:
            return file.read() if _is_own(os.fstat(file.fileno())) else None
    except OSError:
        return None


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def write(path: Path, content: bytes) -> bool:
    """Write a file whole or not at all, whoever else writes it; False, with one warning a process, if that fails.

    Folders that are missing are made for this user alone.
    """
    try:
        _make_folder(path.parent)
        _replace(path, content)
    except OSError as error:
        warn_once(
            f"{path.parent} cannot be written ({_reason(error)}): compiled kernels and profiles are not kept, and "
            f"are made again each time; set the environment variable {FOLDER_VARIABLE} to a folder that can",
            cause="unwritable cache folder",
        )
        return False
    return True


def why_not_writable() -> str | None:
    """Why nothing can be kept in the cache folder, or None if something can: tried with an empty file."""
    try:
        folder = cache_folder()
        _make_folder(folder)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return _reason(error)


def warn_once(text: str, *, cause: str) -> None:
    """Warn, unless this process has warned about `cause` before."""
    if cause not in _warned:
        _warned.add(cause)
        warnings.warn(text, KVOffloadWarning, stacklevel=2)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _make_folder(folder: Path) -> None:
    """With those above it: `Path.mkdir` would give them another mode."""
    if not folder.parent.exists():
        _make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def _replace(path: Path, content: bytes) -> None:
    """In the same folder, since a file system replaces only its own files in one step."""
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
