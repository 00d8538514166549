"""Reading a trace: JSON lines, each with `hash_ids`, one id per prefix block of a request."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvoffload.terminal.console import CommandError

KEY_BYTES = 16  # a hash id as a cache key: signed, big-endian

Request = tuple[bytes, ...]


def require_readable(path: Path) -> None:
    """CommandError now, not after other options were checked, if a trace is missing, a folder, or may not be read.

    A pipe is not opened: what has been read from it once cannot be read again.
    """
    with _refused(path):
        mode = path.stat().st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            path.open("rb").close()


class Trace(NamedTuple):
    """What a trace says.

    Attributes:
        requests: the keys of each, in the order of the file.
        seconds: when each came, from the first one on; None unless all lines have a "timestamp", in milliseconds, none
            is smaller than the one before, and the last is larger than the first.
    """

    requests: list[Request]
    seconds: list[float] | None


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """The requests of `read_timed_trace`."""
    return read_timed_trace(path, limit).requests


def read_timed_trace(path: Path, limit: int | None = None) -> Trace:
    """The first `limit` requests, all of them for None, and when they came.

    Lines of white space are passed over. An empty `hash_ids` is a request for nothing.

    Raises:
        CommandError: the file cannot be read, or a line is broken; the message names it by its number.
    """
    requests: list[Request] = []
    stamps: list[Any] = []
    with _refused(path), path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(requests) >= limit:
                break
            if line.strip():
                record = _parse(line, f"{path}, line {number}")
                requests.append(_keys(record, f"{path}, line {number}"))
                stamps.append(record.get("timestamp"))
    return Trace(requests, _seconds(stamps))


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"cannot read the trace {path}: {error.strerror or error}") from error


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{where}: not a JSON object: {error}") from error
    if not isinstance(record, dict):
        raise CommandError(f"{where}: must be a JSON object, got {_shown(record)}")
    return record


def _keys(record: dict[str, Any], where: str) -> Request:
    if "hash_ids" not in record:
        raise CommandError(f'{where}: has no "hash_ids"')
    ids = record["hash_ids"]
    if not isinstance(ids, list):
        raise CommandError(f'{where}: "hash_ids" must be a list of integers, got {_shown(ids)}')
    return tuple(_key(each, f'{where}: "hash_ids"[{position}]') for position, each in enumerate(ids))


def _seconds(stamps: list[Any]) -> list[float] | None:
    """See `Trace.seconds`."""
    numbers = [stamp for stamp in stamps if isinstance(stamp, int | float) and not isinstance(stamp, bool)]
    if len(numbers) < len(stamps) or not stamps or not all(map(math.isfinite, numbers)):
        return None
    if stamps != sorted(stamps) or stamps[0] == stamps[-1]:
        return None
    return [(stamp - stamps[0]) / 1000 for stamp in stamps]


def _key(hash_id: Any, where: str) -> bytes:
    if not isinstance(hash_id, int) or isinstance(hash_id, bool):
        raise CommandError(f"{where} must be an integer, got {_shown(hash_id)}")
    try:
        return hash_id.to_bytes(KEY_BYTES, "big", signed=True)
    except OverflowError:
        raise CommandError(f"{where} must fit into {8 * KEY_BYTES} bits, got {_shown(hash_id)}") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
