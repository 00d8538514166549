"""TierManager: one thread that moves keys between the slots of a cache and its tiers.

Callers leave it messages; it alone calls the promoter and the writer, under its lock. It is woken by callers and by
tiers, and sleeps otherwise. It refers to the cache weakly, and ends with it, but not before every tier's call that may
touch a slot has returned.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence

from kvoffload.cache.index import CacheIndex
from kvoffload.cache.statistics import CacheEvent
from kvoffload.internal.log import LOGGER
from kvoffload.internal.waiting import wait_until
from kvoffload.tiering.below import TierBelow
from kvoffload.tiering.promoter import Promoter
from kvoffload.tiering.promotion import ChainedLoad, PromotionRecord
from kvoffload.tiering.writer import Writer
from kvoffload.tiering.writes import WriteChoice
from kvoffload.tiers.tier import Tier

_POLL = 5e-3  # seconds between looks at stores that are in flight
_ALL: frozenset[bytes] = frozenset()  # stands for every key

Message = PromotionRecord | ChainedLoad | CacheEvent | tuple[bytes, ...]
"""A promotion to begin, a load to chain, what happened in the cache, or the keys of a request that has ended."""


class TierManager:
    """The tiers of a cache.

    Args:
        index: of the cache.
        tiers: attached to its slots, in the order in which they are asked.
        choice: what is written to them.
        seconds_per_key: what computing a key's blocks takes; None: not known.
        hung: seconds after which a tier's call is taken for one that does not return.
        shares: of the entries that promotions may have reserved, and that may be leased for writing.
        settle: brings the cache up to date; returns whether stores are in flight.
        submit: submits a chained load.
    """

    def __init__(
        self,
        index: CacheIndex,
        tiers: Sequence[Tier],
        choice: WriteChoice,
        *,
        seconds_per_key: float | None,
        hung: float,
        shares: tuple[float, float],
        settle: Callable[[], bool],
        submit: Callable[[ChainedLoad, int], None],
    ) -> None:
        self.tiers = [TierBelow(tier, hung) for tier in tiers]
        self.lock = threading.RLock()
        self.closed = False
        self._choice = choice
        self._settle, self._submit = settle, submit
        self._woken = threading.Event()
        most_reserved, most_leased = (max(1, int(share * index.capacity)) for share in shares)
        self._promoter = Promoter(index, self.tiers, seconds_per_key, most_reserved, self.wake)
        self._promoter.refused = self._is_removed
        self._writer = Writer(index, self.tiers, most_leased, self.wake, choice.written)
        self._messages = deque[Message]()
        self._chained: list[ChainedLoad] = []
        self._removing = dict[object, frozenset[bytes]]()
        promoter = weakref.WeakMethod(self._promoter.io)
        index._state.in_flight.append(lambda: () if (io := promoter()) is None else io())
        woken = self._woken
        reference = weakref.ref(self, lambda _: woken.set())
        self._thread = threading.Thread(target=_run, args=(reference, woken), name="kvoffload-tiers", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look at everything soon."""
        self._woken.set()

    def tell(self, message: Message) -> None:
        """Leave a message, and wake the thread."""
        self._messages.append(message)
        self._woken.set()

    # removing -----------------------------------------------------------------------------------------------------

    def begin_removal(self, keys: Collection[bytes] | None) -> object:
        """From now until `end_removal` these keys (None: all) are neither written nor promoted; returns a token."""
        token = object()
        with self.lock:
            self._removing[token] = _ALL if keys is None else frozenset(keys)
            self._writer.forget(self._is_removed)
        return token

    def end_removal(self, token: object) -> None:
        with self.lock:
            self._removing.pop(token, None)

    def _is_removed(self, key: bytes) -> bool:
        return any(keys is _ALL or key in keys for keys in self._removing.values())

    # the thread ---------------------------------------------------------------------------------------------------

    def step(self) -> float | None:
        """Do what there is to do; returns the seconds after which to look again, None: when woken."""
        in_flight = self._settle()
        with self.lock:
            while self._messages:
                self._take(self._messages.popleft())
            for record in self._promoter.advance():
                record.end()
            self._writer.advance()
            ready = [chained for chained in self._chained if chained.promotion.ended]
            self._chained = [chained for chained in self._chained if not chained.promotion.ended]
            deadline = self._promoter.next_deadline()
        for chained in ready:
            self._submit(chained, chained.promotion.ready)
        waits = [_POLL] if in_flight else []
        if deadline is not None:
            waits.append(max(0.0, deadline - time.monotonic()))
        return min(waits, default=None)

    def _take(self, message: Message) -> None:
        if isinstance(message, PromotionRecord):
            self._promoter.begin(message)
        elif isinstance(message, ChainedLoad):
            self._chained.append(message)
        elif isinstance(message, CacheEvent):
            self._heard(message)
        else:
            self._write(self._choice.ended(message), "")

    def _heard(self, event: CacheEvent) -> None:
        if event.kind == "stored":
            self._write(self._choice.stored(event.keys), event.tenant)
        elif event.kind == "promoted":
            self._choice.promoted(event.keys)
        elif event.kind in ("evicted", "removed"):
            self._choice.left(event.keys)

    def _write(self, keys: Sequence[bytes], tenant: str) -> None:
        if self._removing:
            keys = [key for key in keys if not self._is_removed(key)]
        if keys:
            self._writer.add(keys, tenant)

    @property
    def busy(self) -> bool:
        """Whether tiers may still touch slots."""
        return bool(self._promoter.going_on or self._writer.going_on or self._promoter.io())

    # the end ------------------------------------------------------------------------------------------------------

    def drain(self, timeout: float | None) -> bool:
        """Wait until what is to be written so far is written, and durable; False after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if end is None else max(0.0, end - time.monotonic())

        def written() -> bool:
            self.wake()
            with self.lock:
                return self._writer.idle and not self._messages and not self._settle()

        try:
            wait_until(written, left(), "writing to tiers")
        except TimeoutError:
            return False
        drained = [below.tier.drain(left()) for below in self.tiers]
        return all(drained)

    def close(self, timeout: float) -> bool:
        """End the thread and close the tiers; whether no call of a tier goes on."""
        with self.lock:
            self.closed = True
            for record in self._promoter.abandon():
                record.end()
            self._writer.forget(lambda _: True)
        self.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        for chained in self._chained:
            self._submit(chained, 0)
        end = time.monotonic() + timeout
        ended = [below.tier.close(max(0.0, end - time.monotonic())) for below in self.tiers]
        with self.lock:
            self._writer.advance()
        return all(ended) and not self.busy


def _run(reference: weakref.ref[TierManager], woken: threading.Event) -> None:
    while True:
        manager = reference()
        if manager is None or manager.closed:
            return
        woken.clear()
        try:
            wait = manager.step()
        except BaseException:  # nothing ends the thread: the tiers would be dead without a word
            LOGGER.exception("the thread of a cache's tiers: an error; it goes on")
            wait = 0.1
        keeps = manager if manager.busy else None  # its slots must not be given to another cache
        del manager
        woken.wait(1.0 if keeps is not None and wait is None else wait)
        del keeps
