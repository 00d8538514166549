"""Reads a trace: JSON lines, each with `hash_ids`, one id per prefix block of a request; also compressed by gzip."""

from __future__ import annotations

import gzip
import json
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvoffload.internal.checks import shown
from kvoffload.terminal.console import CommandError

KEY_BYTES = 16  # a hash id as a cache key: signed, big-endian
WANTED = (  # what errors end with
    'each line of a trace is a request such as {"hash_ids": [1, 2, 3], "timestamp": 0, "session": "a"}, with an id for '
    "each block of its prompt (docs/guides/what-would-it-save.md says how to make one from other logs)"
)
_MOST_MILLISECONDS = 1e300  # differences of larger numbers may be infinite

Request = tuple[bytes, ...]


def require_readable(path: Path) -> None:
    """Raise CommandError at once if a trace is missing, a folder, or may not be read.

    A pipe is not opened: its content can be read only once.
    """
    with _refused(path):
        mode = path.stat().st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            path.open("rb").close()


class Trace(NamedTuple):
    """The requests of a trace.

    Attributes:
        requests: the keys of each, in the order of the file.
        seconds: when each request came, counted from the first. None unless every line has a "timestamp" in
            milliseconds, they never fall, and the last is larger than the first.
        sessions: the conversation or agent that each request belongs to. None unless every line has a "session".
    """

    requests: list[Request]
    seconds: list[float] | None = None
    sessions: list[str] | None = None


def read_timed_trace(path: Path, limit: int | None = None) -> Trace:
    """Read the first `limit` requests (None: all), their times, and their sessions.

    Blank lines are skipped. An empty `hash_ids` is a request for nothing.

    Raises:
        CommandError: the file cannot be read, or a line is no such request; the message has its number.
    """
    requests: list[Request] = []
    stamps: list[Any] = []
    named: list[str] = []
    with _refused(path), path.open("rb") as file:
        lines = gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(requests) >= limit:
                break
            if line.strip():
                keys, stamp, session = _parse(line, f"{path}, line {number}")
                requests.append(keys)
                stamps.append(stamp)
                named += [] if session is None else [session]
    sessions = named if len(named) == len(requests) else None
    numbers = [stamp for stamp in stamps if isinstance(stamp, int | float) and not isinstance(stamp, bool)]
    timed = len(numbers) == len(stamps) and all(-_MOST_MILLISECONDS < stamp < _MOST_MILLISECONDS for stamp in numbers)
    if not timed or numbers != sorted(numbers) or numbers[:1] == numbers[-1:]:
        return Trace(requests, None, sessions)
    return Trace(requests, [(stamp - numbers[0]) / 1000 for stamp in numbers], sessions)


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CommandError(f"cannot read the trace {path}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise CommandError(f"cannot read the trace {path}: its gzip data is damaged or cut off: {error}") from error


def _parse(line: bytes, where: str) -> tuple[Request, Any, str | None]:
    """Return the keys of a request, its timestamp, of any type, and its session."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{where}: not a JSON object ({error}), got {shown(line[:60], 60)}; {WANTED}") from error
    if not isinstance(record, dict):
        raise CommandError(f"{where}: must be a JSON object, got {shown(record, 60)}; {WANTED}")
    if "hash_ids" not in record:
        raise CommandError(f'{where}: has no "hash_ids", but {shown(", ".join(record), 60)}; {WANTED}')
    ids = record["hash_ids"]
    if not isinstance(ids, list):
        raise CommandError(f'{where}: "hash_ids" must be a list of integers, got {shown(ids, 60)}')
    keys = list[bytes]()
    for position, each in enumerate(ids):
        if not isinstance(each, int) or isinstance(each, bool):
            raise CommandError(f'{where}: "hash_ids"[{position}] must be an integer, got {shown(each, 60)}')
        try:
            keys.append(each.to_bytes(KEY_BYTES, "big", signed=True))
        except OverflowError:
            fits = f"must fit into {8 * KEY_BYTES} bits"
            raise CommandError(f'{where}: "hash_ids"[{position}] {fits}, got {shown(each, 60)}') from None
    session = record.get("session")
    if session is not None and (not isinstance(session, str | int) or isinstance(session, bool)):
        raise CommandError(f'{where}: "session" must be a string or an integer, got {shown(session, 60)}')
    return tuple(keys), record.get("timestamp"), None if session is None else str(session)
