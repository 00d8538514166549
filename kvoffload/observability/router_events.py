"""Cache events as the messages that routers read, so that a request goes to the host that holds its beginning.

vLLM publishes these messages (vllm/distributed/kv_events.py: BlockStored, BlockRemoved and AllBlocksCleared), and the
routers of Dynamo, llm-d and AIBrix subscribe to them. They are plain data: you pack them with msgpack and send them. On
the wire vLLM sends three frames over a ZeroMQ PUB socket: a topic, the sequence number in 8 bytes, big-endian, and the
payload. A subscriber that has missed a number asks for the later ones over a ROUTER socket.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

from kvoffload.cache.keys import as_tokens
from kvoffload.cache.statistics import CacheEvent
from kvoffload.internal.checks import at_least
from kvoffload.internal.nesting import new_lock, refuse_nested

Medium = Literal["GPU", "CPU", "DISK", "STORAGE", "EXTERNAL"]
Form = Literal["map", "array"]

_HASH_BYTES = 8
_STORED, _REMOVED = ("stored", "promoted"), ("evicted", "removed")
_LOCAL = ("GPU", "CPU", "DISK")  # a "STORAGE" or "EXTERNAL" may be of this host or of many


class Batch(NamedTuple):
    """Messages that are sent together.

    Attributes:
        sequence: the number of the batch, from 0 on. A missing number stands for messages that were lost.
        payload: for msgpack: lists, tuples, dicts, strings, numbers and None. It is
            `(ts, events, data_parallel_rank)`; `ts` is in seconds since the epoch. With the form "array" an event is
            `("BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name)`,
            `("BlockRemoved", block_hashes, medium)` or `("AllBlocksCleared",)`; `lora_id` is always None,
            `parent_block_hash` and `lora_name` are if there is none. With "map" it is a dict of the same values by
            these names, None included, with `type` for the event's name, and `locality`, "LOCAL", if the medium is
            GPU, CPU or DISK.
    """

    sequence: int
    payload: Any


class _Described(NamedTuple):
    """The data of a key in messages, besides its hash."""

    parent: bytes | None
    token_ids: tuple[int, ...]
    lora_name: str | None


class RouterEvents:
    """Turns the events of a cache into messages for routers. Usable from any thread; waits for no router and no I/O.

        events = RouterEvents(layout.tokens_per_block * layout.blocks_per_slot)
        cache = BlockCache(engine, on_event=events)
        events.describe(keys, token_ids)            # for each request, before its keys are stored or promoted
        batch = events.take()                       # from time to time; send it

    A key's hash in messages is its last 8 bytes as an unsigned integer, as vLLM shortens its own. Routers need the
    tokens of a key, which the cache does not know: keys not described are left out of "BlockStored".

    Routers skip a block if they do not know its parent, the block of the tokens before. So a key whose parent was
    described, but is in no medium yet, is reported right after its parent.

    Routers hash the tokens themselves, and do not see the salt of `chain_keys`: prefixes that differ only by salt are
    the same prefix to them. Adapters differ by `lora_name`. When the cache begins to use other weights, routers hear
    that it holds nothing, and then only of keys of these weights that are stored from then on.

    A cache over a `SharedPool` does not hear of evictions, so that routers would be told of ever more keys.

    Args:
        tokens_per_key: tokens that a key covers: `layout.tokens_per_block * layout.blocks_per_slot`. Configure routers
            with the same block size.
        medium: the name that routers are given for the slots of the cache.
        rank: the data-parallel rank of this server.
        form: of each message. "map": a dict, as vLLM 0.24 and newer send it; "array": without names of fields, as vLLM
            0.23 and older did. Choose "array" only for a router that does not read maps yet.
        remembered: the number of keys whose tokens are kept, those described last.
        most_pending: the number of messages that are kept for `take`; one more, and all of these are lost.
        most_batches: the number of batches that are kept for `since`.
        clock: returns seconds since the epoch.

    Attributes:
        not_described: how many stored keys were left out, because `describe` was not called for them, or more than
            `remembered` keys were described since.
        lost: how many messages were lost, because `take` was not called in time. Each loss leaves a number out of the
            sequence, by which subscribers notice.

    Raises:
        ValueError: a bad argument. `clock` is not checked.
    """

    def __init__(
        self,
        tokens_per_key: int,
        *,
        medium: Medium = "CPU",
        rank: int = 0,
        form: Form = "map",
        remembered: int = 1 << 16,
        most_pending: int = 100_000,
        most_batches: int = 10_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.tokens_per_key = at_least("tokens_per_key", tokens_per_key, 1)
        self.rank = at_least("rank", rank, 0)
        if form not in ("map", "array"):
            raise ValueError(f"form must be map or array, got {form!r:.80}")
        if medium not in get_args(Medium):
            raise ValueError(f"medium must be one of {', '.join(get_args(Medium))}, got {medium!r:.80}")
        self.medium: Medium = medium
        self.form: Form = form
        self.not_described = 0
        self.lost = 0
        self._remembered = at_least("remembered", remembered, 1)
        self._most_pending = at_least("most_pending", most_pending, 1)
        self._clock = clock
        self._lock = new_lock()
        self._described: OrderedDict[bytes, _Described] = OrderedDict()
        self._present: dict[bytes, set[Medium]] = {}  # keys that routers know of, and where
        self._waiting: dict[bytes, dict[tuple[bytes, Medium], None]] = {}  # by the parent that they do not know of
        self._parent_of: dict[tuple[bytes, Medium], bytes] = {}  # of those that wait
        self._pending: deque[Any] = deque()
        self._batches: deque[Batch] = deque(maxlen=at_least("most_batches", most_batches, 1))
        self._next = 0
        self._weights = ""  # those of the keys that routers know of

    def describe(
        self, keys: Sequence[bytes], token_ids: Any, *, parent: bytes | None = None, lora_name: str | None = None
    ) -> None:
        """Say which tokens keys stand for. Call it for every request before its keys are stored or promoted.

        Args:
            keys: of one request, as `chain_keys` returned them.
            token_ids: the tokens of the request, as given to `chain_keys`; tokens after the last key are ignored.
            parent: the key of the tokens before these; None: these begin the request.
            lora_name: name of the adapter; None: the model without one.

        Raises:
            ValueError: there are too few tokens for so many keys, or `token_ids` are not one sequence of integers in
                [0, 2**32).
            RuntimeError: you called it inside another call of this object, in the same thread.
        """
        step, ids = self.tokens_per_key, as_tokens(token_ids).tolist()
        if len(ids) < step * len(keys):
            raise ValueError(
                f"{len(keys)} keys of {step} tokens each need {step * len(keys)} token_ids, got {len(ids)}"
            )
        refuse_nested(self._lock, "describe")
        with self._lock:
            for number, key in enumerate(keys):
                tokens = tuple(ids[step * number : step * (number + 1)])
                self._described[key] = _Described(parent, tokens, lora_name)
                self._described.move_to_end(key)
                parent = key
            for _ in range(len(self._described) - self._remembered):
                self._described.popitem(last=False)

    # what happens -------------------------------------------------------------------------------------------------

    def __call__(self, event: CacheEvent) -> None:
        """Take an event of a cache: pass the object as `on_event`."""
        if event.kind == "weights":
            self._weights = event.weights
            self.cleared()
        elif event.weights != self._weights:
            return
        elif event.kind in _STORED:
            self.stored(event.keys, self.medium)
        elif event.kind in _REMOVED:
            self.removed(event.keys, self.medium)

    def stored(self, keys: Sequence[bytes], medium: Medium) -> None:
        """Report that these keys can be loaded from that medium from now on. For the slots the cache calls this, by
        `on_event`; call it yourself for other media.

        A key is reported after its parent, since a promotion brings keys in any order. Keys that were not described are
        left out. RuntimeError inside another call of this object, in the same thread.
        """
        refuse_nested(self._lock, "stored")
        with self._lock:
            together: list[bytes] = []
            last = medium
            for key, where in self._reportable(keys, medium):
                if together:
                    # A message has one parent, of its first key: each of the others follows the one before it.
                    before, after = self._described[together[-1]], self._described[key]
                    if where != last or after.parent != together[-1] or after.lora_name != before.lora_name:
                        self._add(self._stored(together, last))
                        together = []
                together.append(key)
                last = where
            if together:
                self._add(self._stored(together, last))

    def removed(self, keys: Sequence[bytes], medium: Medium) -> None:
        """Report that these keys can no longer be loaded from that medium. For the slots the cache calls this, by
        `on_event`; call it yourself for other media. Keys that were not reported as stored there are left out.
        RuntimeError inside another call of this object, in the same thread.
        """
        refuse_nested(self._lock, "removed")
        with self._lock:
            gone = list[bytes]()
            for key in keys:
                parent = self._parent_of.pop((key, medium), None)
                if parent is not None:  # it has waited for its parent: routers do not know it
                    siblings = self._waiting[parent]
                    del siblings[key, medium]
                    if not siblings:
                        del self._waiting[parent]
                    continue
                media = self._present.get(key, set())
                if medium not in media:  # it was not described, or never stored there: routers do not know it
                    continue
                gone.append(key)
                media.remove(medium)
                self._present.pop(key if not media else b"", None)
            if gone:
                self._add(self._message("BlockRemoved", block_hashes=list(map(_hash_of, gone)), medium=medium))

    def cleared(self) -> None:
        """Report that this server holds nothing any more, in any medium. Call it after a restart. A cache reports what
        it evicts or removes itself, `clear` included. RuntimeError inside another call of this object, in the same
        thread.
        """
        refuse_nested(self._lock, "cleared")
        with self._lock:
            for known in (self._present, self._waiting, self._parent_of):
                known.clear()
            self._add(self._message("AllBlocksCleared"))

    # sending ------------------------------------------------------------------------------------------------------

    def take(self) -> Batch | None:
        """Return the messages since the previous call, as a batch for you to send; None if there are none. The batch is
        also kept for `since`, where the oldest one goes if there are more than `most_batches`. Call it often enough: if
        more than `most_pending` messages wait, all but the newest are lost.

        Raises:
            RuntimeError: you called it inside another call of this object, in the same thread.
        """
        refuse_nested(self._lock, "take")
        with self._lock:
            if not self._pending:
                return None
            events = list(self._pending)
            batch = Batch(self._next, (self._clock(), events, self.rank))
            self._batches.append(batch)
            self._pending.clear()
            self._next += 1
            return batch

    def since(self, sequence: int) -> list[Batch]:
        """Return the kept batches with this number and later ones, the oldest first: for subscribers that missed some.
        Batches that are kept no more, or were lost, are left out; [] if none is left. The batches stay kept. Messages
        that `take` has not returned yet are in none.
        """
        with self._lock:
            return list(filter(lambda batch: batch.sequence >= sequence, self._batches))

    # parents before children --------------------------------------------------------------------------------------

    def _reportable(self, keys: Sequence[bytes], medium: Medium) -> Iterator[tuple[bytes, Medium]]:
        """Yield the keys whose parents routers know, each followed by the keys that have waited for it."""
        rest = [(key, medium) for key in reversed(keys)]
        while rest:
            key, where = rest.pop()
            described = self._described.get(key)
            if described is None:
                self.not_described += 1
                continue
            parent = described.parent
            if parent is not None and parent in self._described and parent not in self._present:
                self._waiting.setdefault(parent, {})[key, where] = None
                self._parent_of[key, where] = parent
                continue
            self._present.setdefault(key, set()).add(where)
            yield key, where
            for child in self._waiting.pop(key, {}):
                del self._parent_of[child]
                rest.append(child)

    # messages -----------------------------------------------------------------------------------------------------

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
        if self.form == "array":
            return (kind, *fields.values())
        where = {"locality": "LOCAL"} if fields.get("medium") in _LOCAL else {}
        return {"type": kind, **fields, **where}

    def _add(self, message: Any) -> None:
        if len(self._pending) >= self._most_pending:
            self.lost += len(self._pending)
            self._pending.clear()
            self._next += 1
        self._pending.append(message)


def _hash_of(key: bytes) -> int:
    return int.from_bytes(key[-_HASH_BYTES:], "big")
