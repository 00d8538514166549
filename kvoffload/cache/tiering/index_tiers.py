"""IndexTiers: the tiers below an index, whatever moves the bytes above it: what TieredCache and TieredIndex share."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from kvoffload.cache.entries import Status, check_keys
from kvoffload.cache.index import CacheIndex
from kvoffload.cache.statistics import CacheEvent
from kvoffload.cache.tiering.attaching import HOST, MISSING, PENDING, UNKNOWN, attach, records_in
from kvoffload.cache.tiering.below import CacheTierStatistics, fits
from kvoffload.cache.tiering.job import Outcome, TierJob
from kvoffload.cache.tiering.manager import Removal, TierManager
from kvoffload.cache.tiering.promotion import ChainedLoad, PromotionRecord
from kvoffload.cache.tiering.tier import Tier
from kvoffload.cache.tiering.writer import WriteAdmitted, WriteBack, WriteChoice, WriteNothing, WriteThrough
from kvoffload.errors import TierError
from kvoffload.internal.checks import flag, to_wait
from kvoffload.internal.nesting import refuse_nested
from kvoffload.internal.types import UInt8Array

WriteName = Literal["admitted", "through", "back", "none"]
_CHOICES: dict[str, Callable[[int], WriteChoice]] = {
    "admitted": WriteAdmitted,
    "through": lambda _: WriteThrough(),
    "back": lambda _: WriteBack(),
    "none": lambda _: WriteNothing(),
}

HUNG = 30.0  # seconds
_PROMOTING, _WRITING = 0.5, 0.25  # shares of the entries
_REMOVAL = 60.0  # seconds that `remove` and `clear` wait for tiers
_HEARD = ("stored", "promoted", "evicted", "removed")


def check_options(write: str, hung: float) -> None:
    """Raise ValueError unless they are what `TieredCache` takes."""
    if write not in _CHOICES:
        raise ValueError(f"write must be one of {', '.join(_CHOICES)}, got {write!r:.80}")
    if not to_wait("hung", hung) > 0:
        raise ValueError(f"hung must be seconds above 0, got {hung!r:.80}")


class Hook:
    """`on_event` of the index: tells the manager, which is made later, and then the caller's hook."""

    def __init__(self, then: Callable[[CacheEvent], None] | None) -> None:
        if then is not None and not callable(then):
            raise TypeError(f"on_event must be a function of a CacheEvent, got {then!r:.80}")
        self._then = then
        self.manager: Callable[[], TierManager | None] = lambda: None

    def __call__(self, event: CacheEvent) -> None:
        manager = self.manager()
        if manager is not None and event.kind in _HEARD:
            manager.post(event)
        if self._then is not None:
            self._then(event)


class IndexTiers:
    """The tiers below an index. Usable from any thread.

    Args:
        index: its entries are rows of the pools.
        hook: the index's `on_event`.
        tiers: checked; become its own, and are closed with it, or if this raises.
        pools, layout: for `Tier.attach`.
        write, hung: checked; see `TieredCache`.
        seconds_per_key: what computing a key's blocks takes; None: not known, so that everything is promoted.
        settle, submit: see `TierManager`.

    Attributes:
        manager: moves the keys.
    """

    def __init__(
        self,
        index: CacheIndex,
        hook: Hook,
        tiers: Sequence[Tier],
        pools: Sequence[UInt8Array],
        layout: bytes | None,
        *,
        write: WriteName,
        hung: float,
        seconds_per_key: float | None,
        settle: Callable[[], bool] = lambda: False,
        submit: Callable[[ChainedLoad], None] = lambda _: None,
    ) -> None:
        self._index = index
        attach(tiers, pools, layout)
        try:
            self.manager = TierManager(
                index,
                tiers,
                _CHOICES[write](records_in(tiers, pools)),
                seconds_per_key=seconds_per_key,
                hung=hung,
                shares=(_PROMOTING, _WRITING),
                settle=settle,
                submit=submit,
            )
            hook.manager = weakref.ref(self.manager)
        except BaseException:
            for tier in tiers:
                tier.close()
            raise

    @property
    def names(self) -> list[str]:
        return [below.tier.name for below in self.manager.tiers]

    def locate(self, keys: Sequence[bytes]) -> list[str]:
        """See `TieredCache.locate`."""
        checked = check_keys(keys)
        hit, pending = Status.HIT, Status.PENDING  # looking them up in the class takes as long as all the rest
        places = [
            HOST if status is hit else PENDING if status is pending else MISSING
            for status in self._index.status(checked)
        ]
        tiers = self.manager.tiers
        missing = [position for position, place in enumerate(places) if place is MISSING]
        for below in tiers:
            wanted = [checked[position] for position in missing]
            found = self.manager.calling_tiers(partial(below.has, wanted)) if missing else []
            for position, has in zip(missing, found, strict=True):
                if has:
                    places[position] = below.tier.name
            missing = [position for position, has in zip(missing, found, strict=True) if not has]
        if not all(below.local_index for below in tiers):
            places = [UNKNOWN if place is MISSING else place for place in places]
        return places

    def promote(
        self,
        keys: Sequence[bytes],
        deadline: float | None,
        tenant: str,
        check_open: Callable[[], None],
        *,
        counted: bool = True,
    ) -> PromotionRecord:
        """See `TieredIndex.promote`; `check_open` raises if nothing can be promoted any more."""
        refuse_nested(self._index.lock, "promote")
        checked = check_keys(keys, repeats=False)
        flag("counted", counted)
        if deadline is not None and not to_wait("deadline", deadline) > 0:
            raise ValueError(f"deadline must be seconds above 0 from now, or None, got {deadline!r:.80}")
        self._index._state.pools.of(tenant)
        check_open()
        until = None if deadline is None else time.monotonic() + deadline
        record = PromotionRecord(checked, tenant, until, self.manager.refuse_nested, counted=counted)
        self.manager.promote(record)
        return record

    def statistics(self) -> list[CacheTierStatistics]:
        return self.manager.calling_tiers(lambda: [below.statistics() for below in self.manager.tiers])

    def remove(self, keys: Sequence[bytes], here: Callable[[], int]) -> int:
        """Have tiers lose these keys, and the index by `here`; returns what that returns. See `TieredCache.remove`."""
        below = [key for key in keys if fits(key)]
        return self._removing(Removal(keys), here, lambda tier: tier.remove(below) if below else None)

    def clear(self, here: Callable[[], int]) -> int:
        """The same for all keys."""
        return self._removing(Removal(None), here, lambda tier: tier.clear())

    def _removing(self, removal: Removal, here: Callable[[], int], below: Callable[[Tier], TierJob | None]) -> int:
        self.manager.refuse_nested("remove")
        try:
            self.manager.begin_removal(removal)
            count = here()
            tiers = [each.tier for each in self.manager.tiers]
            wrong = self.manager.calling_tiers(lambda: _failed_removals(below, tiers))
        finally:
            self.manager.end_removal(removal)
        if wrong:
            raise TierError(
                f"tier {', '.join(wrong)} failed to remove them, or did not answer within {_REMOVAL:g} seconds: it may "
                "have them still; remove them again once it works"
            )
        return count


def _failed_removals(remove: Callable[[Tier], TierJob | None], tiers: list[Tier]) -> list[str]:
    """Have all tiers remove keys, and wait for them; returns the names of those that may have them still."""
    jobs: list[TierJob | None] = []
    failed = []
    for tier in tiers:
        try:
            jobs.append(remove(tier))
        except Exception:  # a tier of the user's, or one that is closed
            failed.append(tier.name)
            jobs.append(None)
    end = time.monotonic() + _REMOVAL
    for tier, job in zip(tiers, jobs, strict=True):
        try:
            outcomes = [] if job is None else job.wait(max(0.0, end - time.monotonic()))
        except Exception:
            outcomes = [Outcome.FAILED]
        if not all(outcome in (Outcome.DONE, Outcome.MISSING) for outcome in outcomes):
            failed.append(tier.name)
    return failed
