"""What the commands share: where output goes, options, and the device.

stdout carries the result alone: tables, or one JSON object. Notes and progress bars go to stderr, bars only to a
terminal.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from kvoffload.device.device import Device, open_device
from kvoffload.errors import CapabilityError, DriverError
from kvoffload.internal.models import MODELS, ModelGeometry, find_model

SIMULATED_BANNER = "SIMULATED DEVICE: bytes are checked for real, no time is a GPU's"
Advance = Callable[[int, int], None]  # done, in all


class CommandError(Exception):
    """A command cannot be carried out; the message says why and what to do."""


class Output:
    """Results to stdout, as tables or as one JSON object; notes and progress to stderr.

    Raises:
        CommandError: tables are asked for and rich is not installed.
    """

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self._rich = find_spec("rich") is not None
        if not as_json and not self._rich:
            raise CommandError("tables need rich: pip install 'kvoffload[cli]' (or use --json)")

    def note(self, text: str) -> None:
        print(text, file=sys.stderr)

    def result(self, fields: dict[str, Any]) -> None:
        """The JSON object, if that is what was asked for."""
        if self.as_json:
            print(as_json(fields))

    def banner(self, simulated: bool) -> None:
        """Say on stdout that nothing here was measured on a GPU."""
        if simulated and not self.as_json:
            self.line(SIMULATED_BANNER)

    def line(self, text: str) -> None:
        if not self.as_json:
            print(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table with its first column to the left and the others to the right; nothing with --json."""
        if self.as_json:
            return
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title, title_justify="left", header_style="bold")
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*(str(cell) for cell in row))
        console = Console() if sys.stdout.isatty() else Console(width=200)
        console.print(table, markup=False, highlight=False)

    @contextmanager
    def progress(self, what: str) -> Iterator[Advance]:
        """A bar on stderr: call what this yields with (done, in all). Nothing when stderr is no terminal."""
        if not (self._rich and sys.stderr.isatty()):
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
    """What JSON has: no NaN, no infinity, no tuples."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout instead of tables")
    parser.add_argument(
        "--backend",
        choices=("auto", "cuda", "simulated"),
        default="auto",
        help="auto (the default) takes the simulated device where there is no usable GPU, and says so",
    )
    parser.add_argument("--device", type=whole(0), default=0, metavar="N", help="which GPU (default 0)")


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
        backend = "cuda" if arguments.backend == "cuda" else "simulated"
        device = open_device(arguments.device, backend=backend, seed=seed if backend == "simulated" else None)
    except ValueError as error:
        raise CommandError(f"--device {arguments.device}: {error}") from error
    if device.simulated:
        output.note(f"kvoffload: {SIMULATED_BANNER}")
    return device


def whole(minimum: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least `minimum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        return value

    return parse


def scale(text: str) -> float:
    """An argparse type: a number above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


def model(text: str) -> ModelGeometry:
    """An argparse type: the name of a geometry."""
    try:
        return find_model(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def models(text: str) -> list[ModelGeometry]:
    """An argparse type: the name of a geometry, or `all`."""
    return list(MODELS.values()) if text == "all" else [model(text)]


def numbers(text: str) -> list[int]:
    """An argparse type: positive integers, comma-separated."""
    return [whole(1)(part) for part in text.split(",")]


def mib(nbytes: float) -> str:
    """Bytes as text: MiB below 1 GiB, else GiB."""
    return f"{nbytes / (1 << 30):.2f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.2f} MiB"
