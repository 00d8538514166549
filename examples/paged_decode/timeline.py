"""Records when computations and transfers ran, by events on their streams (the GPU's clock), and draws it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import kvoffload


class Span(NamedTuple):
    """A computation, a transfer or a round; seconds since the timeline was created."""

    kind: str
    begin: float
    end: float


class Timeline:
    """Records events while a workload is served. Close it before the device.

    A computation begins when the earlier work on its stream has ended, including waits for transfers; if the framework
    does not expose its stream, it begins with the call. It ends when its result is on the host. A transfer ends with an
    event that follows it, and begins as many seconds earlier as the engine has measured.
    """

    def __init__(self, device: kvoffload.Device) -> None:
        self._device, self._driver = device, device.driver
        self._computations: list[tuple[str, int, int]] = []
        self._transfers: list[tuple[kvoffload.Job, int]] = []
        self._rounds: list[int] = []
        self._events: list[int] = []
        self._marked: set[int] = set()  # streams with events
        with device.current():
            self._idle = self._driver.stream_create(0)
            self._lanes = {direction: self._driver.stream_create(0) for direction in kvoffload.Direction}
        self._origin = self._mark(self._idle)

    def begin_round(self) -> None:
        self._rounds.append(self._mark(self._idle))

    @contextmanager
    def computing(self, stream: int | None, kind: str) -> Iterator[None]:
        """Record the computation inside the `with`; `stream` is None if the framework does not expose it."""
        stream = self._idle if stream is None else stream
        begin = self._mark(stream)
        yield
        self._computations.append((kind, begin, self._mark(stream)))

    def transfer(self, job: kvoffload.CacheJob) -> None:
        """Record a transfer that you have just submitted."""
        for each in job.jobs:
            lane = self._lanes[each.direction]
            each.order_before(lane)
            self._transfers.append((each, self._mark(lane)))

    def spans(self) -> list[Span]:
        """All spans. A round lasts until the next one. Computations and transfers must have ended."""
        with self._device.current():
            for stream in self._marked:
                self._driver.stream_synchronize(stream)
        computations = [Span(kind, self._seconds(begin), self._seconds(end)) for kind, begin, end in self._computations]
        ends = [(job, self._seconds(event)) for job, event in self._transfers]
        transfers = [Span(str(job.direction), end - job.wait().seconds, end) for job, end in ends]
        rounds = [self._seconds(event) for event in self._rounds]
        rounds.append(max(span.end for span in computations))
        return [*computations, *transfers, *(Span("round", *pair) for pair in itertools.pairwise(rounds))]

    def close(self) -> None:
        """Destroy events and streams. All computations and transfers must have ended."""
        with self._device.current():
            for event in self._events:
                self._driver.event_destroy(event)
            for stream in (self._idle, *self._lanes.values()):
                self._driver.stream_destroy(stream)

    def _mark(self, stream: int) -> int:
        with self._device.current():
            event = self._driver.event_create(timing=True)
            self._events.append(event)
            self._driver.event_record(event, stream)
        self._marked.add(stream)
        return event

    def _seconds(self, event: int) -> float:
        with self._device.current():
            return self._driver.event_seconds(self._origin, event)


_LANES = (("prefill", "#f08c00"), ("decode", "#1c7ed6"), ("load", "#2b8a3e"), ("store", "#d6336c"))


def draw(timelines: Mapping[str, list[Span]], path: str) -> None:
    """Draw two rounds in the middle: a panel for each mode, on one time axis."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(timelines), sharex=True, figsize=(11, 1 + 1.6 * len(timelines)), squeeze=False)
    for axes, (name, spans) in zip(panels[:, 0], timelines.items(), strict=True):
        _draw_panel(axes, name, spans)
    panels[-1, 0].set_xlabel("ms since the first of two rounds began, on the GPU's clock")
    figure.tight_layout()
    figure.savefig(path, dpi=160)
    pyplot.close(figure)


def _draw_panel(axes: Any, name: str, spans: list[Span]) -> None:
    rounds = [span for span in spans if span.kind == "round"]
    shown = rounds[(len(rounds) - 1) // 2 :][:2]
    first, second = shown[0], shown[-1]
    for height, (kind, colour) in enumerate(_LANES):
        bars = [
            (1e3 * (span.begin - first.begin), 1e3 * (span.end - span.begin))
            for span in spans
            if span.kind == kind and span.end > first.begin and span.begin < second.end
        ]
        axes.broken_barh(bars, (-height - 0.4, 0.8), color=colour, linewidth=0)
    axes.axvline(1e3 * (second.begin - first.begin), color="#7b8794", linewidth=0.8)
    axes.set_yticks([-height for height in range(len(_LANES))], [kind for kind, _ in _LANES])
    axes.set_ylim(0.6 - len(_LANES), 0.6)
    axes.set_title(name, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
