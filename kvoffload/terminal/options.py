"""Types and options of the command line that several commands have.

Every number has an upper limit: no option may lead to an overflow, or to a request for memory that no machine has.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

from kvoffload.internal.checks import parsed_size
from kvoffload.internal.models import MODELS, ModelGeometry, find_model
from kvoffload.terminal.console import WIDTH, wrap

LARGEST = (1 << 32) - 1  # of counts, unless an option has a limit of its own

_SEPARATED = r"[+-]?\d{1,3}([,.' ]\d{3})+"  # a number with thousands separators

_DETAILS = "docs/command-line.md"


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=WIDTH)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width=width).splitlines()  # argparse would break words at hyphens

    def _format_action(self, action: argparse.Action) -> str:
        """For sub-commands just their list: argparse puts a line with their metavar above it."""
        listed = [action]
        if isinstance(action, argparse._SubParsersAction):
            listed = list(action._get_subactions())
        return "".join(super(_Formatter, self)._format_action(each) for each in listed)


def add_command(
    commands: Any, name: str, summary: str, text: str, *, example: str, common: str = "", usage: str = "[options]"
) -> argparse.ArgumentParser:
    """Add the parser of a command, whose help shows every option, in lines of 80 columns.

    `name` and `summary` are in the list of commands; `common` names the options of `add_common_options`, "" for none.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=wrap(text),
        formatter_class=_Formatter,
        add_help=False,
        usage=f"%(prog)s {usage}",
        epilog=(f"common: {common}\n" if common else "") + f"example: kvoffload {example}\nmore: {_DETAILS}",
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    return parser


COMMON = "--json, --backend auto|cuda|simulated, --device N"


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `COMMON` names. With `auto`, the simulated device is used if there is no usable GPU."""
    hidden = argparse.SUPPRESS
    parser.add_argument("--json", action="store_true", help=hidden)
    parser.add_argument("--backend", choices=("auto", "cuda", "simulated"), default="auto", help=hidden)
    parser.add_argument("--device", type=whole(0), default=0, metavar="N", help=hidden)


def add_seed(parser: argparse.ArgumentParser, use: str) -> None:
    parser.add_argument("--seed", type=whole(0, (1 << 63) - 1), default=0, metavar="N", help=f"for {use} (default 0)")


def whole(minimum: int, maximum: int = LARGEST) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            without = " without thousands separators" if re.fullmatch(_SEPARATED, text) else ""
            raise argparse.ArgumentTypeError(f"must be an integer{without}, got {text!r:.80}") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        if value > maximum:
            raise argparse.ArgumentTypeError(f"must be at most {maximum}, got {text}")
        return value

    return parse


def size(text: str) -> int:
    """An argparse type: bytes, such as 64GiB, 1.5TiB, 64GB or 4096; at least 1."""
    nbytes = parsed_size(text)
    if nbytes is None:
        raise argparse.ArgumentTypeError(f"must be bytes, such as 64GiB, 64GB (10**9 each) or 65536, got {text!r:.80}")
    if not 1 <= nbytes <= 1 << 60:
        raise argparse.ArgumentTypeError(f"must be 1 byte to 2**60, got {text!r:.80}")
    return nbytes


def scale(text: str) -> float:
    """An argparse type: a number above 0 and at most 1."""
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


def positive(text: str) -> float:
    """An argparse type: a finite number above 0."""
    value = _number(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
    return value


def not_negative(text: str) -> float:
    """An argparse type: 0, or a finite number above it."""
    return 0.0 if text.strip() in ("0", "0.0") else positive(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None


def model(text: str) -> ModelGeometry:
    try:
        return find_model(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def models(text: str) -> list[ModelGeometry]:
    """An argparse type: the name of a geometry, or `all`."""
    return list(MODELS.values()) if text == "all" else [model(text)]


def numbers(text: str, maximum: int = LARGEST) -> list[int]:
    first, *others = text.split(",")
    if any(re.fullmatch(r"0\d\d", part) for part in others):  # 1,024 is no 1 and 24
        raise argparse.ArgumentTypeError(
            f"must be integers without thousands separators, a comma between two of them, got {text!r:.80}"
        )
    return [whole(1, maximum)(part) for part in (first, *others)]
