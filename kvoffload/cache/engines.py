"""The engine as a BlockCache sees it, and the arguments that go to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from kvoffload.cache.entries import check_keys
from kvoffload.engine.base import Engine
from kvoffload.engine.engine import OffloadEngine
from kvoffload.engine.wait_streams import After, ShardedAfter
from kvoffload.errors import ClosedError, LayoutError
from kvoffload.internal.checks import shown
from kvoffload.internal.types import Int64Array, StreamLike
from kvoffload.layout.ids import as_ids
from kvoffload.layout.layout import KVLayout, ShardedLayout

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


def checked_ids(
    layout: KVLayout | ShardedLayout,
    keys: Sequence[bytes],
    blocks: Any,
    tag: bytes,
    *,
    targets: bool = False,
    distinct: bool = False,
) -> tuple[list[bytes], list[Int64Array]]:
    """Check and copy the keys, with the tag of their weights, and the block ids of each group: an array (keys,
    blocks_per_slot).

    Without `targets`, for a store, no key may repeat. Targets must be distinct: the engine checks that group by group,
    when the groups before are submitted already. `distinct`: neither keys nor targets may repeat.
    """
    checked = check_keys(keys, repeats=targets and not distinct, tag=tag)
    factor, groups = layout.blocks_per_slot, layout.groups
    lists = [blocks] if len(groups) == 1 else list(blocks) if isinstance(blocks, Iterable) else []
    if len(lists) != len(groups):
        raise LayoutError(f"blocks must hold one list of ids per group ({len(groups)}), got {shown(blocks)}")
    per_group = []
    for group, ids in enumerate(lists):
        name = "blocks" if len(groups) == 1 else f"blocks[{group}]"
        array = as_ids(name, ids, groups[group].num_blocks)
        if len(array) != len(checked) * factor:
            each = "one id" if factor == 1 else f"{factor} ids"
            raise LayoutError(f"{name} must hold {each} for each key, here {len(checked) * factor}, got {len(array)}")
        if targets and (distinct or len(groups) > 1) and len(set(array.tolist())) < len(array):
            raise LayoutError(f"{name} repeats an id; the targets of a load must be distinct")
        per_group.append(array.reshape(len(checked), factor))
    return checked, per_group


def check_parts(engine: CacheEngine, parts: Any) -> None:
    groups = engine.layout.num_groups
    if groups > 1 and parts is not None and not isinstance(parts, int | np.integer):
        raise LayoutError(
            f"parts must be a number for a layout of {groups} groups, each of which is copied in so many; "
            f"got {parts!r:.80}"
        )
    engine.check_parts(parts)
