"""Growing: a pool that is pinned piece by piece while its engine serves.

Addresses, slot numbers and tables cover the whole pool from the start. Only slots below `Engine.pinned_slots` may be
used, and that number grows.

    constructor     map all, pin the first piece  ->  the engine is returned
    Growth          a thread: pin a piece of each device's pool in turn, until all are pinned, one cannot be, or the
                    engine is closed

While a piece is registered, the driver holds its own lock, and submissions wait: `kvoffload bench growth` measures it.
On an H100, 256 MiB took 4.5 ms (median) to 7.0 ms. Many pieces cost, too: docs/guides/size-a-pool.md has figures.

The thread takes no lock but that of the memory whose piece it pins, so what waits for it holds nothing that it needs.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvoffload.device.pinned import PinnedMemory
from kvoffload.internal.checks import at_least
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import new_thread

PIECE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Growing:
    """A pool of `nbytes` that is pinned while it is used: `pool_bytes=Growing(64 << 30)` of an engine or `open_cache`.

    The engine's constructor returns after the first piece; a thread pins the rest. Until then transfers may use the
    slots below `engine.pinned_slots` only (else CapacityError), and a cache has so many fewer entries free. If memory
    runs short, the pool stays as it is by then: a warning is logged, and `engine.statistics().pinning_error` says why.

    If the first piece cannot be pinned, the engine's constructor raises CapacityError, as for a pool that does not
    grow.

    Args:
        nbytes: of the whole pool, on all devices together; never more. A number, no text.
        piece_bytes: of one device's pool, pinned at a time; rounded down to whole slots, but at least one. Transfers
            wait while a piece is registered (256 MiB: up to 8 ms), so smaller pieces make shorter waits.

    Raises:
        ValueError: not positive integers.
    """

    nbytes: int
    piece_bytes: int = field(default=PIECE_BYTES, kw_only=True)

    def __post_init__(self) -> None:
        at_least("nbytes", self.nbytes, 1)
        at_least("piece_bytes", self.piece_bytes, 1)


class Growth:
    """Pins the rest of an engine's pools in a thread.

    Args:
        pools: for each device its context, and the memory whose first piece is pinned.

    Attributes:
        running: whether the thread may pin more. Once this is False, no more is pinned, and nothing is unpinned.
        error: why it has stopped early; None if it has not.
    """

    def __init__(self, pools: Sequence[tuple[int, PinnedMemory]]) -> None:
        self.running = True
        self.error: str | None = None
        self._pools = pools

    def start(self) -> None:
        """Start the thread. If the system has none left, the pools do not grow."""
        try:
            new_thread("kvoffload-growth", self._run).start()
        except RuntimeError as error:
            self._stop(error)

    def _run(self) -> None:
        growing, ended = list(self._pools), None
        try:
            while growing:
                growing = [(context, memory) for context, memory in growing if memory.pin_next(context)]
        except BaseException as error:  # noqa: BLE001  # of the driver, or of `progress`
            ended = error
        self._stop(ended)

    def _stop(self, error: BaseException | None) -> None:
        if error is not None:
            self.error = f"{type(error).__name__}: {error}"
            if threading.main_thread().is_alive():  # at the interpreter's end no thread can be started to touch pages
                LOGGER.warning("a pool has stopped growing, and serves with what is pinned: %s", self.error)
        self.running = False
