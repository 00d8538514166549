"""What the commands share: standard output and standard error, and the device.

Standard output carries the result alone: tables, or one JSON object. Notes and progress bars go to standard error, bars
only to a terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal

from kvoffload.device.device import Device, open_device
from kvoffload.errors import CapabilityError, DriverError

SIMULATED_BANNER = "SIMULATED DEVICE: bytes are verified, no figure comes from a GPU"
Advance = Callable[[int, int], None]  # done, in all


class CommandError(Exception):
    """A command cannot be carried out; the message names the reason and the remedy."""


class OutputError(Exception):
    """Standard output cannot be written: it is closed, it is full, or the process that read it has ended."""


def write_out(text: str) -> None:
    """Write to standard output, and flush it.

    Raises:
        OutputError: it cannot be written.
    """
    require_out()
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        raise OutputError(f"cannot write to standard output: {error.strerror or error}") from error
    except ValueError as error:  # its encoding lacks a character
        raise OutputError(f"cannot write to standard output: {error}") from error


def require_out() -> None:
    """Raise OutputError if standard output is closed."""
    if sys.stdout is None or sys.stdout.closed:  # None: the process was started with descriptor 1 closed
        raise OutputError("standard output is closed")


def discard_out() -> None:
    """Send what is still buffered for standard output nowhere; else the interpreter tries again at its exit."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(descriptor, sys.stdout.fileno())
        finally:
            os.close(descriptor)


def write_error(text: str) -> None:
    """Write a line to standard error, if there is one that can be written."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


class Output:
    """Results to stdout, as tables or as one JSON object; notes and progress to stderr.

    Raises:
        CommandError: tables are asked for and rich is not installed.
        OutputError: standard output is closed. The other methods raise it if standard output cannot be written.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._rich = find_spec("rich") is not None
        require_out()  # now, not after minutes of measuring
        if not as_json and not self._rich:
            raise CommandError("tables need rich: pip install 'kvoffload[cli]' (or use --json)")

    def note(self, text: str) -> None:
        write_error(text)

    def result(self, fields: dict[str, Any]) -> None:
        """Print the JSON object, if JSON was asked for."""
        if self.as_json:
            write_out(as_json(fields) + "\n")

    def banner(self, simulated: bool) -> None:
        """Say on standard output that no figure comes from a GPU."""
        if simulated and not self.as_json:
            self.line(SIMULATED_BANNER)

    def line(self, text: str) -> None:
        if not self.as_json:
            write_out(text + "\n")

    def table(self, title: str, columns: Sequence[str], lines: Sequence[Sequence[object]]) -> None:
        """A table with its first column to the left and the others to the right; nothing with --json."""
        if self.as_json:
            return
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left", header_style="bold")
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
        for line in lines:
            table.add_row(*(str(cell) for cell in line))
        console = Console() if sys.stdout.isatty() else Console(width=200)
        with console.capture() as capture:
            console.print(table, markup=False, highlight=False)
        write_out(capture.get())

    @contextmanager
    def progress(self, what: str) -> Iterator[Advance]:
        """A bar on stderr: call what this yields with (done, in all). Nothing when stderr is no terminal."""
        if not (self._rich and sys.stderr is not None and sys.stderr.isatty()):
            yield _no_progress
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def _no_progress(done: int, total: int) -> None:
    pass


def as_json(fields: dict[str, Any]) -> str:
    """One line."""
    return json.dumps(_plain(fields))


def _plain(value: Any) -> Any:
    """A value that JSON has: no NaN, no infinity, no tuples."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def open_backend(arguments: argparse.Namespace, output: Output, seed: int = 0) -> Device:
    """The device that was asked for; with `auto`, the simulated one if CUDA has none to offer.

    Raises:
        CommandError: there is no such device.
        CapabilityError, DriverError: `--backend cuda` and CUDA cannot be used.
    """
    try:
        if arguments.backend == "auto":
            try:
                return open_device(arguments.device, backend="cuda")
            except (CapabilityError, DriverError) as error:
                output.note(f"kvoffload: no GPU to use ({error})")
        backend: Literal["cuda", "simulated"] = "cuda" if arguments.backend == "cuda" else "simulated"
        device = open_device(arguments.device, backend=backend, seed=seed if backend == "simulated" else None)
    except ValueError as error:
        raise CommandError(f"--device {arguments.device}: {error}") from error
    if device.simulated:
        output.note(f"kvoffload: {SIMULATED_BANNER}")
    return device


def mib(nbytes: float) -> str:
    """Bytes as text: MiB below 1 GiB, else GiB."""
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.2f} MiB"


def bandwidth(nbytes: int, seconds: float) -> float | None:
    """GB/s, or None where nothing was moved."""
    return round(nbytes / seconds / 1e9, 2) if seconds > 0 else None
