"""Cache events as the messages that routers read, so that a request is sent to the host that holds its beginning.

The messages are those that vLLM publishes (vllm/distributed/kv_events.py: BlockStored, BlockRemoved and
AllBlocksCleared) and that the routers of Dynamo, llm-d and AIBrix subscribe to. They are plain data: packing them with
msgpack and sending them is left to the caller. On the wire vLLM sends three frames over a ZeroMQ PUB socket: a topic,
the sequence number in 8 bytes, big-endian, and the payload. A subscriber that has missed a number asks for what follows
it over a ROUTER socket.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

from kvoffload.cache.statistics import CacheEvent
from kvoffload.internal.checks import at_least
from kvoffload.layout.ids import as_ids

Medium = Literal["GPU", "CPU", "DISK", "EXTERNAL"]
Form = Literal["array", "map"]

_HASH_BYTES = 8
_TOKEN_LIMIT = 1 << 32
_STORED, _REMOVED = ("stored", "promoted"), ("evicted", "removed")


class Batch(NamedTuple):
    """Events that are sent together.

    Attributes:
        sequence: its number, from 0 on. A number that is left out stands for events that were lost.
        payload: what msgpack packs: lists, tuples, dicts, strings, numbers and None.
    """

    sequence: int
    payload: Any


class _Described(NamedTuple):
    """What a message says of a key besides its hash."""

    parent: bytes | None
    token_ids: tuple[int, ...]
    lora_name: str | None


class RouterEvents:
    """Turns what happens in a cache into messages for routers. Usable from any thread; never blocks.

        events = RouterEvents(layout.tokens_per_block * layout.blocks_per_slot)
        cache = BlockCache(engine, on_event=events)
        events.describe(keys, token_ids)            # for each request, before its keys are stored or promoted
        batch = events.take()                       # from time to time; send it

    A key's hash in messages is its last 8 bytes as an unsigned integer, as vLLM shortens its own. The cache does not
    know the tokens of a key, and routers need them: keys that were not described are left out of "BlockStored".

    Routers hash the tokens themselves, and do not see the salt of `chain_keys`: what differs by tenant looks the same
    to them. Adapters differ by `lora_name`.

    Args:
        tokens_per_key: that each key covers; routers must be configured with the same block size.
        medium: where the slots of the cache are, for routers.
        rank: the data-parallel rank of this server.
        form: "array" for messages as arrays without names of fields, as vLLM has sent them from the beginning; "map"
            for dicts, as later versions of vLLM send them. Dynamo's router reads events of both.
        remembered: keys of which tokens are known, those described last.
        most_pending: events between two calls of `take`; more are lost.
        most_batches: that `since` can return.
        clock: returns seconds since the epoch.

    Attributes:
        not_described: keys that were stored and left out, since `describe` was not called for them, or too long ago.
        lost: events that were dropped, since `take` was not called; a number is left out of the sequence then.

    Raises:
        ValueError, TypeError: bad arguments.
    """

    def __init__(
        self,
        tokens_per_key: int,
        *,
        medium: Medium = "CPU",
        rank: int = 0,
        form: Form = "array",
        remembered: int = 1 << 16,
        most_pending: int = 100_000,
        most_batches: int = 10_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.tokens_per_key = at_least("tokens_per_key", tokens_per_key, 1)
        self.rank = at_least("rank", rank, 0)
        if form not in ("array", "map"):
            raise ValueError(f"form must be array or map, got {form!r:.80}")
        if medium not in get_args(Medium):
            raise ValueError(f"medium must be one of {', '.join(get_args(Medium))}, got {medium!r:.80}")
        self.medium: Medium = medium
        self.form: Form = form
        self.not_described = 0
        self.lost = 0
        self._remembered = at_least("remembered", remembered, 1)
        self._most_pending = at_least("most_pending", most_pending, 1)
        self._clock = clock
        self._lock = threading.Lock()
        self._described: OrderedDict[bytes, _Described] = OrderedDict()
        self._pending: deque[Any] = deque()
        self._batches: deque[Batch] = deque(maxlen=at_least("most_batches", most_batches, 1))
        self._next = 0

    def describe(
        self,
        keys: Sequence[bytes],
        token_ids: Any,
        *,
        parent: bytes | None = None,
        lora_name: str | None = None,
    ) -> None:
        """Say which tokens keys stand for, before they are stored or promoted.

        Args:
            keys: of one request, as `chain_keys` has returned them.
            token_ids: that they were computed from, as for `chain_keys`; those behind the last key are ignored.
            parent: the key of the tokens before these; None: these begin the request.
            lora_name: of the adapter.

        Raises:
            ValueError: there are too few tokens for so many keys.
            LayoutError: token_ids are no integers.
        """
        step, ids = self.tokens_per_key, as_ids("token_ids", token_ids, _TOKEN_LIMIT).tolist()
        if len(ids) < step * len(keys):
            raise ValueError(
                f"{len(keys)} keys of {step} tokens each need {step * len(keys)} token_ids, got {len(ids)}"
            )
        with self._lock:
            for number, key in enumerate(keys):
                tokens = tuple(ids[step * number : step * (number + 1)])
                self._described[key] = _Described(parent, tokens, lora_name)
                self._described.move_to_end(key)
                parent = key
            while len(self._described) > self._remembered:
                self._described.popitem(last=False)

    # what happens -------------------------------------------------------------------------------------------------

    def __call__(self, event: CacheEvent) -> None:
        """`on_event` of a cache."""
        if event.kind in _STORED:
            self.stored(event.keys, self.medium)
        elif event.kind in _REMOVED:
            self.removed(event.keys, self.medium)

    def stored(self, keys: Sequence[bytes], medium: Medium) -> None:
        """These keys are in that medium from now on. To be called for tiers; for the cache `on_event` does it."""
        with self._lock:
            known = [key for key in keys if key in self._described]
            self.not_described += len(keys) - len(known)
            together: list[bytes] = []
            for key in known:
                if together and not self._continues(together[-1], key):
                    self._add(self._stored(together, medium))
                    together = []
                together.append(key)
            if together:
                self._add(self._stored(together, medium))

    def removed(self, keys: Sequence[bytes], medium: Medium) -> None:
        """These keys have left that medium: evicted or removed."""
        if keys:
            with self._lock:
                self._add(self._message("BlockRemoved", block_hashes=list(map(_hash_of, keys)), medium=medium))

    def cleared(self) -> None:
        """This server holds nothing any more, in any medium: after a restart, for example."""
        with self._lock:
            self._add(self._message("AllBlocksCleared"))

    # sending ------------------------------------------------------------------------------------------------------

    def take(self) -> Batch | None:
        """The events since the latest call, to be sent; None if there are none."""
        with self._lock:
            if not self._pending:
                return None
            events = list(self._pending)
            fields = {"ts": self._clock(), "events": events, "data_parallel_rank": self.rank}
            batch = Batch(self._next, fields if self.form == "map" else tuple(fields.values()))
            self._batches.append(batch)
            self._pending.clear()
            self._next += 1
            return batch

    def since(self, sequence: int) -> list[Batch]:
        """The latest batches that `take` has returned, from this number on: for subscribers that missed some."""
        with self._lock:
            return [batch for batch in self._batches if batch.sequence >= sequence]

    # messages -----------------------------------------------------------------------------------------------------

    def _continues(self, key: bytes, following: bytes) -> bool:
        """Whether a message may name a key directly behind another one: it has one parent, of its first key."""
        before, after = self._described[key], self._described[following]
        return after.parent == key and after.lora_name == before.lora_name

    def _stored(self, keys: Sequence[bytes], medium: Medium) -> Any:
        described = [self._described[key] for key in keys]
        parent = described[0].parent
        return self._message(
            "BlockStored",
            block_hashes=list(map(_hash_of, keys)),
            parent_block_hash=None if parent is None else _hash_of(parent),
            token_ids=[token for each in described for token in each.token_ids],
            block_size=self.tokens_per_key,
            lora_id=None,
            medium=medium,
            lora_name=described[0].lora_name,
        )

    def _message(self, kind: str, **fields: Any) -> Any:
        return {"type": kind, **fields} if self.form == "map" else (kind, *fields.values())

    def _add(self, message: Any) -> None:
        if len(self._pending) >= self._most_pending:
            self.lost += len(self._pending)
            self._pending.clear()
            self._next += 1
        self._pending.append(message)


def _hash_of(key: bytes) -> int:
    return int.from_bytes(key[-_HASH_BYTES:], "big")
