"""How a benchmark runs and ends: the device, its figures as tables, JSON and plots, and what was wrong."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvoffload.bench import plots
from kvoffload.bench.cases import FULL, SMALL, Lab
from kvoffload.copiers import FragmentShape, kernel_spec, why_not
from kvoffload.device.device import Device
from kvoffload.errors import CapabilityError
from kvoffload.kernels import load_kernel
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import CommandError, Output, add_common_options, as_json, open_backend, whole

Fields = dict[str, Any]


def add_bench_options(parser: argparse.ArgumentParser, repeats: int, *, figures: bool = True) -> None:
    """`repeats` is the default; `figures`: whether plots.py draws this benchmark."""
    parser.add_argument("--repeats", type=whole(1), metavar="N", help=f"timed rounds (default {repeats}; simulated 1)")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the bytes and of where blocks lie (default 0)")
    use = ", for `bench plot`" if figures else ""
    parser.add_argument("--save", type=Path, metavar="FILE", help=f"write all figures to FILE, as JSON{use}")
    if figures:
        parser.add_argument("--plot", metavar="FOLDER", help="draw the figures, as PNGs in FOLDER; needs matplotlib")
    add_common_options(parser)
    parser.set_defaults(default_repeats=repeats)
    if not figures:
        parser.set_defaults(plot=None)


def conduct(
    arguments: argparse.Namespace,
    name: str,
    measure: Callable[[Lab, Output], Fields],
    show: Callable[[Fields, Output], None],
) -> int:
    """Measure, print, draw; 0 if every byte was right, else 1.

    Args:
        arguments: with the options of `add_bench_options`.
        measure: gives figures that JSON can hold, among them `wrong_rows`.
        show: prints tables of them.
    """
    output = Output(arguments.json)
    if arguments.plot:
        plots.require()
    if arguments.save is not None:
        require_writable("--save", arguments.save)
    with open_backend(arguments, output, arguments.seed) as device:
        if arguments.plot and device.simulated:
            raise CommandError("--plot draws times, and the simulated device has none")
        if arguments.plot:
            plots.require_folder(arguments.plot)
        repeats = arguments.repeats or (1 if device.simulated else arguments.default_repeats)
        size = SMALL if device.simulated else FULL
        fields: Fields = {"benchmark": name, **describe_device(device), "repeats": repeats}
        with Lab(device, size, repeats=repeats, seed=arguments.seed) as lab:
            fields |= measure(lab, output)
    output.banner(fields["simulated"])
    show(fields, output)
    print_end(fields, output)
    output.result(fields)
    if arguments.save is not None:
        write_whole("--save", arguments.save, (as_json(fields) + "\n").encode())
    if arguments.plot:
        for path in plots.draw({"what was measured": fields}, arguments.plot):
            output.note(f"kvoffload: wrote {path}")
    return 1 if fields["wrong_rows"] else 0


def require_writable(option: str, path: Path) -> None:
    """CommandError now, not after minutes of measuring, if a file cannot be written. What it holds is left alone."""
    with _refused(option, path):
        if path.is_dir() or _is_special(path):
            path.open("ab").close()
            return
        with tempfile.TemporaryFile(dir=path.resolve().parent):
            pass


def write_whole(option: str, path: Path, content: bytes) -> None:
    """Write a file whole, or leave what was there; CommandError if that fails."""
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
        raise CommandError(f"{option} {path}: {error.strerror}") from error


def missing_copiers(device: Device, sm_limit: int = 1) -> dict[str, str | None]:
    """For every copier None, or why it cannot run on the device; a kernel is tried by loading one."""
    missing = why_not(device.capabilities, sm_limit)
    if missing["gather"] is None:
        spec = kernel_spec(FragmentShape(fragment_bytes=2048, word_bytes=8, alignment=16), Direction.LOAD, programs=1)
        try:
            with device.current():
                load_kernel(device.driver, device.capabilities, spec).close()
        except CapabilityError as error:
            missing["gather"] = missing["split"] = str(error)
    return missing


def describe_device(device: Device) -> dict[str, Any]:
    """What a figure was measured on."""
    capabilities, pci = device.capabilities, device.pci
    return {
        "simulated": device.simulated,
        "device": device.name,
        "driver": ".".join(map(str, capabilities.driver_version)),
        "bindings": ".".join(map(str, capabilities.bindings_version)),
        "link": "made up" if device.simulated else f"{pci.link_speed or 'speed unknown'} x{pci.link_width or '?'}",
    }


def print_end(fields: Mapping[str, Any], output: Output) -> None:
    """The ratios, what did not run, where this was, and how many rows were wrong."""
    for name, reason in fields.get("not_run", {}).items():
        output.line(f"not run: {name}: {reason}")
    output.line(f"{fields['device']}, driver {fields['driver']}, bindings {fields['bindings']}, link {fields['link']}")
    if "profile" in fields:
        output.line(f"profile: {fields['profile']}")
    for each in fields.get("ratios", []):
        output.line(f"{each['ratio']}: {each['which']} {each['value']:.2f} ({each['at']})")
    output.line(f"rows of bytes that were wrong: {fields['wrong_rows']}")


def number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
