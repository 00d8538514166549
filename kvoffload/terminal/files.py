"""Files that commands write: checked before minutes of work, and written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvoffload.terminal.console import CommandError


def require_writable(option: str, path: Path) -> None:
    """Raise CommandError now, not after minutes of measuring, if a file cannot be written. Its content is left
    alone.
    """
    with _refused(option, path):
        if path.is_dir() or _is_special(path):
            path.open("ab").close()
            return
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass


def write_whole(option: str, path: Path, content: bytes) -> None:
    """Write a file whole, or leave the old content; CommandError if that fails."""
    with _refused(option, path):
        if _is_special(path):  # such as /dev/stdout
            path.write_bytes(content)
            return
        target = path.resolve()
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            part.write_bytes(content)
            os.replace(part, target)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


@contextmanager
def _refused(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"{option} {path} cannot be written: {error.strerror}") from error
