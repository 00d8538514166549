"""The time that hits save: prefill that is not computed again, less loading the blocks instead."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

from kvoffload.internal.models import ModelGeometry
from kvoffload.terminal.console import CommandError
from kvoffload.terminal.options import whole

_TOKENS_PER_HASH = 512  # of the published traces


@dataclass(frozen=True)
class Rates:
    """Rates that turn hits into seconds.

    Attributes:
        model: its blocks are loaded, at full size.
        load_gb_per_s: host to GPU; None while it is not known.
        measured: whether `load_gb_per_s` was measured in this replay, on the GPU's clock; else it was given.
    """

    model: ModelGeometry
    tokens_per_hash: int
    prefill_tokens_per_second: float
    load_gb_per_s: float | None
    measured: bool = False

    def prefill_seconds(self, hits: int) -> float:
        """Seconds of computing the tokens of `hits` hits."""
        return hits * self.tokens_per_hash / self.prefill_tokens_per_second

    def load_bytes(self, hits: int) -> int:
        """Bytes of the blocks that hold the tokens of `hits` hits, in all planes."""
        return hits * self.tokens_per_hash * self.model.bytes_per_block // self.model.tokens_per_block

    def load_seconds(self, hits: int) -> float | None:
        """Seconds of loading those bytes; None if the bandwidth is not known."""
        if hits == 0:
            return 0.0
        return None if self.load_gb_per_s is None else self.load_bytes(hits) / (self.load_gb_per_s * 1e9)

    @property
    def fields(self) -> dict[str, object]:
        names = ("tokens_per_hash", "prefill_tokens_per_second", "load_gb_per_s")
        known = {name: getattr(self, name) for name in names}
        return {"model": self.model.name, **known, "load_gb_per_s_measured": self.measured}

    def fields_of(self, hits: int) -> dict[str, object]:
        return {
            "prefill_seconds_saved": self.prefill_seconds(hits),
            "load_bytes": self.load_bytes(hits),
            "load_seconds": self.load_seconds(hits),
        }

    def describe(self) -> str:
        """The assumptions behind a table's figures."""
        source = "measured in this replay" if self.measured else "as given"
        loads = (
            "loads not measured" if self.load_gb_per_s is None else f"loads at {self.load_gb_per_s:g} GB/s, {source}"
        )
        return f"prefill at {self.prefill_tokens_per_second:,g} tokens/s as given, {loads}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prefill-tokens-per-second", type=positive, metavar="X", help="print the time that hits save, at this rate"
    )
    parser.add_argument("--load-gb-per-s", type=positive, metavar="X", help="speed of loads, if no GPU measures it")
    add_tokens_per_hash(parser)


def add_tokens_per_hash(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokens-per-hash",
        type=whole(1),
        default=_TOKENS_PER_HASH,
        metavar="N",
        help=f"tokens per hash id (default {_TOKENS_PER_HASH})",
    )


def rates(arguments: argparse.Namespace, *, measures: bool) -> Rates | None:
    """The values of the options of `add_options`; None without --prefill-tokens-per-second."""
    if arguments.prefill_tokens_per_second is None:
        if arguments.load_gb_per_s is not None:
            raise CommandError("--load-gb-per-s is of no use without --prefill-tokens-per-second: give that, too")
        return None
    if arguments.model is None:
        raise CommandError("--prefill-tokens-per-second needs --model: its blocks are the bytes to load")
    if arguments.load_gb_per_s is None and not measures:
        raise CommandError(
            "--prefill-tokens-per-second needs --load-gb-per-s here: loads are timed only when bytes move on a GPU"
        )
    given = None if measures else arguments.load_gb_per_s
    return Rates(arguments.model, arguments.tokens_per_hash, arguments.prefill_tokens_per_second, given)


def positive(text: str) -> float:
    """An argparse type: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 and finite, got {text}")
    return value


def not_negative(text: str) -> float:
    """An argparse type: 0, or a finite number above it."""
    return 0.0 if text.strip() in ("0", "0.0") else positive(text)
