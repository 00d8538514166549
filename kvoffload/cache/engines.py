"""The engine as a BlockCache sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from kvoffload.engine.base import Engine
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.wait_streams import After, ShardedAfter
from kvoffload.errors import ClosedError
from kvoffload.internal.checks import shown
from kvoffload.internal.types import StreamLike

if TYPE_CHECKING:  # typing has defaults from Python 3.13 on; type checkers bring typing_extensions along
    from typing_extensions import TypeIs, TypeVar

    EngineT = TypeVar("EngineT", bound=Engine[Any, Any], default=OffloadEngine)
else:
    from typing import TypeVar

    EngineT = TypeVar("EngineT", bound=Engine)

CacheAfter: TypeAlias = After | ShardedAfter
"""`after=` of the engine's `store`: with several devices, one value for each."""

CacheStreams: TypeAlias = StreamLike | Sequence[StreamLike]
"""A stream; for several devices one for each, in the order of the devices."""


class FollowsTransfers(Protocol):
    """Stands for streams that a framework does not show; `kvoffload.jax.OwnedCache` is one."""

    def _follow_transfers(self) -> None:
        """Have work that the framework is given from now on follow all transfers submitted so far."""


def follows_transfers(stream: CacheStreams | FollowsTransfers) -> TypeIs[FollowsTransfers]:
    """Whether it stands for streams. (Python 3.11 takes 8 to 17 us for `isinstance` with a Protocol, 0.1 for this.)"""
    return hasattr(stream, "_follow_transfers")


CacheEngine: TypeAlias = Engine[Any, Any]
"""An engine over which a cache can be made: of one device or of several."""


def check_engine(engine: CacheEngine) -> None:
    """Raise TypeError or ClosedError unless a cache can be made over `engine`."""
    if not isinstance(engine, Engine):
        raise TypeError(f"engine must be an OffloadEngine or a ShardedEngine, got {shown(engine)}")
    if engine.closed:
        raise ClosedError("the engine is closed; make the cache over one that is open")
