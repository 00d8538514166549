"""Standard output, standard error, and the device, for all commands.

Standard output carries only the result: tables, or one JSON object. Notes and progress bars go to standard error, bars
only to a terminal. Files that commands write are checked before minutes of work, and written whole or not at all.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from kvoffload.device.device import Device, open_device
from kvoffload.errors import CapabilityError, DriverError

SIMULATED_NOTE = "the simulated device verifies bytes; times need a GPU"
Advance = Callable[[int, int], None]  # done, in all


class CommandError(Exception):
    """A command cannot be carried out; the message names the reason and the remedy."""


class OutputError(Exception):
    """Standard output cannot be written: it is closed or full, or see `ReaderEndedError`."""


class ReaderEndedError(OutputError):
    """The process that reads standard output has closed it, as after `| head`."""


def write_out(text: str) -> None:
    """Write to standard output, and flush it."""
    require_out()
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError as error:
        raise ReaderEndedError("cannot write to standard output: its reader has ended") from error
    except OSError as error:
        raise OutputError(f"cannot write to standard output: {error.strerror or error}") from error
    except ValueError as error:  # its encoding lacks a character
        raise OutputError(f"cannot write to standard output: {error}") from error


def require_out() -> None:
    if sys.stdout is None or sys.stdout.closed:  # None: the process was started with descriptor 1 closed
        raise OutputError("standard output is closed")


def discard_out() -> None:
    """Drop text still buffered for standard output; else the interpreter tries to write it again at its exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(descriptor, sys.stdout.fileno())
        finally:
            os.close(descriptor)


def write_error(text: str) -> None:
    """Write a line to standard error, if there is one that can be written; to a terminal in lines of 80 columns."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(wrap(text, "  ") if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


class Output:
    """Results to stdout, as tables or as one JSON object; notes and progress to stderr."""

    def __init__(self, as_json: bool, *, wide: bool = False) -> None:
        self.as_json, self.wide = as_json, wide
        self._rich = find_spec("rich") is not None
        require_out()  # now, not after minutes of measuring

    def note(self, text: str) -> None:
        write_error(text)

    def result(self, fields: dict[str, Any]) -> None:
        """Print the JSON object, if JSON was asked for."""
        if self.as_json:
            write_out(as_json(fields) + "\n")

    def line(self, text: str, indent: str = "  ") -> None:
        """Print text in lines of at most 80 columns, the second and later ones indented; nothing with --json."""
        if not self.as_json:
            write_out(wrap(text, indent) + "\n")

    def path(self, path: object) -> None:
        """Print a path, which is not wrapped; nothing with --json."""
        if not self.as_json:
            write_out(f"{path}\n")

    def table(
        self, title: str, columns: Sequence[str], lines: Sequence[Sequence[object]], *, left: Collection[str] = ()
    ) -> None:
        """Print a title and a table; nothing with --json.

        Its first column and those named in `left` are aligned to the left, the others to the right. At most 80
        columns wide, unless --wide was given.
        """
        if not self.as_json:
            self.line("")
            self.line(title)
            write_out(render(columns, lines, wide=self.wide, left=left))

    @contextmanager
    def progress(self, what: str) -> Iterator[Advance]:
        """Show a bar on stderr: call the yielded function with (done, in all). Nothing without rich, or if stderr is
        not a terminal.
        """
        if not (self._rich and sys.stderr is not None and sys.stderr.isatty()):
            yield lambda done, total: None  # noqa: ARG005
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def as_json(fields: dict[str, Any]) -> str:
    return json.dumps(_plain(fields))


def _plain(value: Any) -> Any:
    """Return a value for JSON: no NaN, no infinity, no tuples."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def open_backend(arguments: argparse.Namespace, seed: int = 0, *, note: bool = True) -> Device:
    """Open the device that was asked for; with `auto`, the simulated one if CUDA offers none.

    With `note`, it writes one line to standard error if it is the simulated device.
    """
    reason = ""
    try:
        if arguments.backend == "auto":
            try:
                return open_device(arguments.device, backend="cuda")
            except (CapabilityError, DriverError):
                reason = "no GPU to use (`kvoffload doctor` shows why): "
        if arguments.backend == "cuda":
            return open_device(arguments.device)
        from kvoffload.simulator import SimulatedDriver

        device = open_device(arguments.device, backend=SimulatedDriver(seed=seed))
    except ValueError as error:
        raise CommandError(f"--device {arguments.device}: {error}") from error
    if note:
        write_error(f"kvoffload: {reason}{SIMULATED_NOTE}")
    return device


def counted(number: int, noun: str) -> str:
    """Return a number and its noun: "1 block", "2 blocks"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def verified_text(verified: int, corrupt: int) -> str:
    """Return the verdict on the loaded blocks: how many were wrong, or whether any were compared."""
    if corrupt:
        return f"{corrupt:,} loaded blocks WRONG"
    return "every loaded byte verified, 0 wrong" if verified else "nothing was loaded"


def mib(nbytes: float) -> str:
    """Return bytes as text: KiB below 1 MiB, MiB below 1 GiB, else GiB."""
    if nbytes < 1 << 20:
        return f"{nbytes / 1024:.1f} KiB"
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.2f} MiB"


def bandwidth(nbytes: int, seconds: float) -> float | None:
    """Return GB/s, or None if nothing was moved."""
    return round(nbytes / seconds / 1e9, 2) if seconds > 0 else None


# files ----------------------------------------------------------------------------------------------------------------


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


# tables ---------------------------------------------------------------------------------------------------------------


WIDTH = 80
WIDE = 1000  # of --wide: as wide as the figures are
_GAP = 2  # between the columns of a table


def wrap(text: str, indent: str = "", width: int = WIDTH) -> str:
    """Break text into lines of at most `width` columns, the later ones indented; a longer word has its own line."""
    lines = textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    return "\n".join(lines)


def column_widths(cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the widths of a table's columns, whose lines fit `width` if their words do; the first line is the
    headings.

    The widest column is narrowed first, and none below its longest word. Headings are broken before cells.
    """
    columns = list(zip(*cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    whole = [max(word, *map(len, column[1:]), 0) for word, column in zip(words, columns, strict=True)]
    room = width - _GAP * (len(columns) - 1)
    for least in (whole, words):
        while sum(widths) > room:
            narrowed = [index for index, each in enumerate(widths) if each > least[index]]
            if not narrowed:
                break
            widths[max(narrowed, key=widths.__getitem__)] -= 1
    return widths


def render(columns: Sequence[str], rows: Sequence[Sequence[object]], *, wide: bool, left: Collection[str] = ()) -> str:
    """Return a table as text: the first column and those named in `left` aligned left, the others right, two spaces
    between.
    """
    cells = [[str(cell) for cell in line] for line in (columns, *rows)]
    widths = column_widths(cells, WIDE if wide else WIDTH)
    aligned = [str.ljust if not index or name in left else str.rjust for index, name in enumerate(columns)]
    lines = []
    for row in cells:  # a row takes several lines where its cells are broken between words
        broken = [wrap(cell, width=max(width, 1)).splitlines() for cell, width in zip(row, widths, strict=True)]
        physical = []
        for texts in zip_longest(*broken, fillvalue=""):
            placed = (align(text, width) for align, text, width in zip(aligned, texts, widths, strict=True))
            physical.append("  ".join(placed).rstrip())
        lines.append("\n".join(physical))
        if row is cells[0]:
            lines.append("  ".join("-" * width for width in widths))
    return "\n".join(lines) + "\n"
