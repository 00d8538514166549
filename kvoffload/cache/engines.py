"""The engine as a BlockCache sees it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from kvoffload.device.device import Device
from kvoffload.engine.base import SlotGuard
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.job import Job
from kvoffload.engine.statistics import EngineStatistics
from kvoffload.engine.wait_streams import After, ShardedAfter
from kvoffload.errors import ClosedError
from kvoffload.internal.checks import shown
from kvoffload.internal.types import StreamLike
from kvoffload.planning.transfer_plan import Direction

if TYPE_CHECKING:
    from typing_extensions import TypeIs, TypeVar  # type checkers bring it along
else:
    from typing import TypeVar

CacheAfter: TypeAlias = After | ShardedAfter
"""`after=` of the engine's `store`: with several devices, one value for each."""

CacheStreams: TypeAlias = StreamLike | Sequence[StreamLike]
"""A stream; for several devices one for each, in the order of the devices."""


class FollowsTransfers(Protocol):
    """Stands for streams that a framework does not show; `kvoffload.jax.OwnedCache` is one."""

    def _follow_transfers(self) -> None:
        """Have work that the framework is given from now on follow all transfers submitted so far."""


def follows_transfers(stream: CacheStreams | FollowsTransfers) -> TypeIs[FollowsTransfers]:
    """Whether it stands for streams. (`isinstance` with a Protocol takes 50 us in Python 3.11.)"""
    return hasattr(stream, "_follow_transfers")


class BlockGroup(Protocol):
    @property
    def num_blocks(self) -> int: ...


class BlockLayout(Protocol):
    @property
    def num_groups(self) -> int: ...

    @property
    def groups(self) -> Sequence[BlockGroup]: ...

    @property
    def blocks_per_slot(self) -> int: ...


@runtime_checkable
class CacheEngine(Protocol):
    """An engine over which a cache can be made; `OffloadEngine` documents the methods."""

    lock: threading.RLock

    @property
    def layout(self) -> BlockLayout: ...

    @property
    def devices(self) -> tuple[Device, ...]: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def pinned_slots(self) -> int: ...

    @property
    def growing(self) -> bool: ...

    @property
    def max_in_flight(self) -> int: ...

    @property
    def submitted(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    def advance(self) -> None: ...

    def check_process(self) -> None: ...

    def check_parts(self, parts: Any) -> None: ...

    def check_room(self, jobs: int) -> None: ...

    def check_usable(self) -> None: ...

    def resolve(self, after: Any) -> Any: ...

    def submit_locked(
        self, direction: Direction, blocks: Any, slots: Any, *, group: int, after: Any, parts: Any = None
    ) -> Job: ...

    def jobs_in_flight(self) -> tuple[Job, ...]: ...

    def guard_slots(self, guard: SlotGuard) -> None: ...

    def statistics(self) -> EngineStatistics: ...


if TYPE_CHECKING:  # typing has defaults from Python 3.13 on
    EngineT = TypeVar("EngineT", bound=CacheEngine, default=OffloadEngine)
else:
    EngineT = TypeVar("EngineT", bound=CacheEngine)


def check_engine(engine: CacheEngine) -> None:
    """Raise TypeError, ClosedError or LayoutError unless a cache can be made over `engine`."""
    if not isinstance(engine, CacheEngine):
        raise TypeError(f"engine must be an OffloadEngine or a ShardedEngine, got {shown(engine)}")
    if engine.closed:
        raise ClosedError("the engine is closed; make the cache over one that is open")
