"""Types and options of the command line that several commands have.

Every number has an upper limit: no option may lead to an overflow, or to a request for memory that no machine has.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from kvoffload.internal.models import MODELS, ModelGeometry, find_model

LARGEST = (1 << 32) - 1  # of counts, unless an option has a limit of its own


def add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout instead of tables")
    parser.add_argument(
        "--backend",
        choices=("auto", "cuda", "simulated"),
        default="auto",
        help="auto (the default) takes the simulated device where there is no usable GPU, and says so",
    )
    parser.add_argument("--device", type=whole(0), default=0, metavar="N", help="which GPU (default 0)")


def add_seed(parser: argparse.ArgumentParser, use: str) -> None:
    """The option `--seed`; `use` names what is random."""
    parser.add_argument("--seed", type=whole(0, (1 << 63) - 1), default=0, metavar="N", help=f"of {use} (default 0)")


def whole(minimum: int, maximum: int = LARGEST) -> Callable[[str], int]:
    """An argparse type: an integer of at least `minimum` and at most `maximum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, got {text!r:.80}") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        if value > maximum:
            raise argparse.ArgumentTypeError(f"must be at most {maximum}, got {text}")
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
    """An argparse type: comma-separated integers from 1 to `LARGEST`."""
    return [whole(1)(part) for part in text.split(",")]
