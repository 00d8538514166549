"""A computation that keeps the GPU busy during a series of transfers, and what its own times say afterwards.

The computation is queued in *chunks* of a few products, each with a timing event before and after it, on a stream of
its own. Chunks are queued ahead of the GPU, before the series and while it lasts. The *window* is the chunks from the
one that was executing when the series began to the one that was executing when it ended.
"""

from __future__ import annotations

import enum
import itertools
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from math import inf
from typing import NamedTuple

from kvoffload.calibration.compute import LARGE, SMALL, Computation, Product, ProductTile
from kvoffload_bench.harness import Lab, Undoing

_CHUNK_SECONDS = 180e-6
_MOST_IN_CHUNK = 8
_AHEAD_SECONDS = 12e-3  # a call that submits 16,384 flat copies takes 10 ms
_LEAD_SECONDS = 1e-3
_ALONE_SECONDS = 5e-3
_QUEUE_PLACES = 600  # of about 1000 that a stream has
_MOST_CHUNKS = 20_000
_GAP_SECONDS = 50e-6  # a shorter one between two chunks is that of the two events
_MOST_IDLE = 0.02


class Situation(enum.StrEnum):
    """What the GPU does during a series of transfers."""

    IDLE = "idle"
    LARGE = "large-products"
    SMALL = "small-products"
    DECODE = "decode-loop"

    @property
    def text(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    Situation.IDLE: "idle GPU",
    Situation.LARGE: "concurrent with products of 8192 x 8192 matrices",
    Situation.SMALL: "concurrent with products of 2048 x 2048 matrices",
    Situation.DECODE: "concurrent with a decode-like loop",
}
PRODUCTS = {
    Situation.LARGE: Product("large products", 8192, 8192, 8192, LARGE.tiles),
    Situation.SMALL: Product("small products", 2048, 2048, 2048, LARGE.tiles),
    Situation.DECODE: Product(  # reads 128 MiB of weights, more than the GPU's cache holds
        "decode-like loop", 64, 8192, 8192, (ProductTile(64, 64, 128, 4, 4), ProductTile(64, 64, 64, 3, 4))
    ),
}


class Span(NamedTuple):
    """Start and end of a chunk on the GPU clock, in seconds from the start of the window."""

    start: float
    end: float


class ComputeTimes(NamedTuple):
    """What was recorded of a computation during one series.

    Attributes:
        spans: of the chunks of the window.
        products: in the window.
        running_at_begin, running_at_end: whether a chunk was unfinished when the series began and when it had ended.
        series_seconds: of the series, wall clock.
    """

    spans: Sequence[Span]
    products: int
    running_at_begin: bool
    running_at_end: bool
    series_seconds: float

    @property
    def window_seconds(self) -> float:
        return self.spans[-1].end - self.spans[0].start


def compute_ended(times: ComputeTimes) -> bool:
    """Whether the computation did not last as long as the transfers, or paused for lack of queued products."""
    gaps = (after.start - before.end for before, after in itertools.pairwise(times.spans))
    idle = sum(gap for gap in gaps if gap > _GAP_SECONDS)
    covered = times.running_at_begin and times.running_at_end
    return not covered or idle > _MOST_IDLE * times.series_seconds


def slowdown(times: ComputeTimes, alone_seconds: float) -> float | None:
    """Time of a product during the series over its time alone; None if the series is shorter than a product alone.

    The window is longer than the series. Outside the series a product takes `alone_seconds`; so what the window took
    longer than its products take alone was lost during the series.
    """
    if times.series_seconds < alone_seconds:
        return None
    lost = times.window_seconds - times.products * alone_seconds
    done = times.series_seconds - lost
    return times.series_seconds / done if done > 0 else inf


class _Chunk(NamedTuple):
    start: int
    end: int


class ConcurrentCompute(Undoing):
    """Keeps products queued. Its methods need the device's context to be current. Free it with `close`.

    Attributes:
        stream: handle of the stream of the products.
        product_seconds: of one product alone, measured when it was made; None on the simulated device.

    Raises:
        CapabilityError: no kernel can be loaded here.
    """

    def __init__(self, lab: Lab, situation: Situation) -> None:
        self._driver, self._simulated = lab.driver, lab.device.simulated
        self._device = lab.device
        self._chunks: list[_Chunk] = []
        self._ended = self._first = 0
        self._running = False
        self._events: list[int] = []
        self._idle_events: list[int] = []
        self.product_seconds: float | None = None
        self._in_chunk, self._ahead = 1, 2
        with ExitStack() as undo:
            product = SMALL if self._simulated else PRODUCTS[situation]
            self._computation = undo.enter_context(Computation(lab.device, product))
            undo.callback(self._destroy_events)
            if not self._simulated:
                self._calibrate()
            self._undo = undo.pop_all()

    def _calibrate(self) -> None:
        """So many products a chunk and chunks ahead that top-ups are short and few."""
        for _ in range(2):  # in the first clocks rise
            seconds = statistics.median(self._computation.seconds_each(48))
        self.product_seconds = seconds
        self._in_chunk = min(max(round(_CHUNK_SECONDS / seconds), 1), _MOST_IN_CHUNK)
        places = _QUEUE_PLACES // (self._in_chunk + 2)
        self._ahead = min(max(round(_AHEAD_SECONDS / (seconds * self._in_chunk)), 3), places)

    @property
    def stream(self) -> int:
        return self._computation.stream

    def begin(self) -> None:
        """Queue chunks, and wait until the first have ended, so that the GPU is computing when a series begins."""
        for _ in range(self._ahead):
            self._queue()
        lead = 1
        if self.product_seconds is not None:
            lead = max(1, round(_LEAD_SECONDS / (self.product_seconds * self._in_chunk)))
        self._top_up_until(lead)
        self._first, self._running = self._ended, self._ended < len(self._chunks)

    def top_up(self) -> None:
        """Look at what has ended, and queue one chunk if there is room for it. Never waits."""
        while self._ended < len(self._chunks) and self._driver.event_query(self._chunks[self._ended].end):
            self._ended += 1
        if len(self._chunks) - self._ended < self._ahead and len(self._chunks) < _MOST_CHUNKS:
            self._queue()

    def end(self, series_seconds: float) -> ComputeTimes:
        """Call it when the series has ended. Waits for all chunks; then `begin` may be called again."""
        while self._ended < len(self._chunks) and self._driver.event_query(self._chunks[self._ended].end):
            self._ended += 1
        first, last, count = self._first, self._ended, len(self._chunks)
        window = self._chunks[min(first, count - 1) : last + 1]
        self._driver.stream_synchronize(self.stream)
        seconds, origin = self._driver.event_seconds, window[0].start
        spans = [Span(seconds(origin, each.start), seconds(origin, each.end)) for each in window]
        self._recycle()
        return ComputeTimes(spans, len(window) * self._in_chunk, self._running, last < count, series_seconds)

    def seconds_alone(self) -> float:
        """Seconds of a product without transfers, queued and measured in the same manner."""
        self.begin()
        least = 1
        if self.product_seconds is not None:
            least = max(2, round(_ALONE_SECONDS / (self.product_seconds * self._in_chunk)))
        self._top_up_until(self._first + least)
        times = self.end(0.0)
        return times.window_seconds / times.products

    def abandon(self) -> None:
        """After a failure: wait for what is queued."""
        self._driver.stream_synchronize(self.stream)
        self._recycle()

    def _top_up_until(self, ended: int) -> None:
        while self._ended < ended:
            self.top_up()

    def _queue(self) -> None:
        chunk = _Chunk(self._event(), self._event())
        self._driver.event_record(chunk.start, self.stream)
        self._computation.queue(self._in_chunk)
        self._driver.event_record(chunk.end, self.stream)
        self._chunks.append(chunk)

    def _event(self) -> int:
        if self._idle_events:
            return self._idle_events.pop()
        self._events.append(self._driver.event_create(timing=True))
        return self._events[-1]

    def _recycle(self) -> None:
        self._idle_events += itertools.chain.from_iterable(self._chunks)
        self._chunks.clear()
        self._ended = self._first = 0

    def _destroy_events(self) -> None:
        with self._device.current():
            self._driver.stream_synchronize(self.stream)
            for event in self._events:
                self._driver.event_destroy(event)
