"""The manager's state for each request of vLLM, and counts of offered keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx

from kvoffload.cache.index import CacheIndex


class RequestState:
    """Kept in vLLM's `ReqContext`, by its type.

    Attributes:
        owner: the index of `request`; several managers may see one context.
        request: the request of the index. Its later keys do not evict its earlier ones.
        record: the index's record for `request`.
        resets: how often the manager had been reset when the request came.
        end: where its last key so far ends, in tokens.
    """

    __slots__ = ("end", "owner", "record", "request", "resets")

    def __init__(self, owner: CacheIndex, resets: int) -> None:
        self.owner = owner
        self.resets = resets
        self.open()

    def open(self) -> None:
        self.request = self.owner.open_request()
        self.record = self.request._record
        self.end = 0

    def keep_order(self, context: ReqContext, added: Sequence[OffloadKey], first: int) -> None:
        """Keep the request's keys in the order of their tokens, even if keys were added before its last one.

        That happens when a partial tail was stored first. Then another request of the index takes over all keys.

        Args:
            first: where the first of `added` ends, in tokens.
        """
        follows = first >= self.end
        last = first if len(added) == 1 else context.get_offload_key_position(added[-1]) or 0
        self.end = end = max(last, self.end)
        if follows:
            return
        keys = list(self.record.keys)
        ordered = sorted(keys, key=lambda key: context.get_offload_key_position(OffloadKey(key)) or 0)
        if ordered != keys:
            self.open()
            self.end = end
            self.owner.records.use((ordered, self.record))


def state_of(index: CacheIndex, context: ReqContext, resets: int) -> RequestState:
    """The state of a context, with an open request of the index; made if there is none."""
    state: RequestState | None = context.get_state(RequestState)
    if state is None or state.owner is not index:
        state = RequestState(index, resets)
        context.set_state(state)
    elif state.record.ended:
        state.open()
    return state


def in_order(keys: list[OffloadKey], context: ReqContext) -> list[OffloadKey]:
    """Sort keys, which come group after group, by the tokens that they stand for.

    If vLLM has not said where a key ends, they stay as they are.
    """
    if len(keys) < 2 or get_offload_group_idx(keys[0]) == get_offload_group_idx(keys[-1]):
        return keys
    ends = list(map(context.get_offload_key_position, keys))
    if None in ends:
        return keys
    return [key for _, key in sorted(zip(ends, keys, strict=True), key=lambda pair: pair[0])]


class Offers:
    """Counts how often keys were offered for storing, so that keys that come only once are not stored.

    Args:
        threshold: a key passes when it has been offered so many times; below 2, every key passes.
        most: keys that are counted. Beyond that it forgets keys whose last offer is longest ago, but none of the
            current offer.

    Attributes:
        skipped: keys that did not pass, since the last `take_skipped`.
    """

    def __init__(self, threshold: int, most: int) -> None:
        self.threshold = threshold
        self.skipped = 0
        self._most = most
        self._counts: OrderedDict[bytes, int] = OrderedDict()

    def note(self, keys: Sequence[bytes]) -> None:
        counts = self._counts
        if self.threshold < 2:
            return
        for key in keys:
            if key in counts:
                counts[key] += 1
                counts.move_to_end(key)
        known = sum(key in counts for key in keys)
        for key in keys:
            if key in counts:
                continue
            if len(counts) >= self._most:
                if known == len(counts):
                    continue
                counts.popitem(last=False)
            counts[key] = 1
            known += 1

    def passing(self, keys: Sequence[bytes]) -> list[bytes]:
        if self.threshold < 2:
            return list(keys)
        found = [key for key in keys if self._counts.get(key, 0) >= self.threshold]
        self.skipped += len(keys) - len(found)
        return found

    def take_skipped(self) -> int:
        skipped, self.skipped = self.skipped, 0
        return skipped
