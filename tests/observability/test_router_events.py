"""RouterEvents: what a router that follows the messages knows is what the cache holds."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import kvoffload
from kvoffload.cache.index import CacheIndex
from kvoffload.cache.statistics import CacheEvent
from kvoffload.observability.router_events import Batch, Medium, RouterEvents

AXES = ("tokens", "heads", "dim")


def hash_of(key: bytes) -> int:
    return int.from_bytes(key, "big") & ((1 << 64) - 1)  # as vLLM does


def key(number: int) -> bytes:
    return bytes(8) + (number + (1 << 63)).to_bytes(8, "big")


def taken_from(events: RouterEvents) -> Batch:
    batch = events.take()
    assert batch is not None
    return batch


class Router:
    """Follows messages: token sequences by medium, from the hashes and tokens alone."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.held: dict[str, set[int]] = {}
        self.prefixes: dict[int, tuple[int, ...]] = {}  # hash to all tokens up to the end of its block
        self.expected = 0

    def read(self, batch: Batch) -> None:
        assert batch.sequence == self.expected
        self.expected += 1
        _, events, rank = json.loads(json.dumps(batch.payload))  # plain data alone
        assert rank == 3
        for event in events:
            getattr(self, event.pop("type"))(**event)

    def BlockStored(  # noqa: N802
        self,
        block_hashes: list[int],
        parent_block_hash: int | None,
        token_ids: list[int],
        block_size: int,
        medium: str,
        **others: Any,
    ) -> None:
        size, parent = block_size, parent_block_hash
        assert (size, others) == (self.block_size, {"lora_id": None, "lora_name": None, "locality": "LOCAL"})
        assert len(token_ids) == size * len(block_hashes)
        before = () if parent is None else self.prefixes[parent]
        assert parent is None or self.knows(parent), "routers skip blocks whose parent they do not know"
        for place, each in enumerate(block_hashes):
            before += tuple(token_ids[size * place : size * (place + 1)])
            assert self.prefixes.setdefault(each, before) == before
            assert each not in self.held.setdefault(medium, set()), "once"
            self.held[medium].add(each)

    def knows(self, block: int) -> bool:
        return any(block in blocks for blocks in self.held.values())

    def BlockRemoved(self, block_hashes: list[int], medium: str, locality: str) -> None:  # noqa: N802
        assert locality == "LOCAL"
        assert self.held[medium].issuperset(block_hashes), "routers were told of them"
        self.held[medium].difference_update(block_hashes)

    def AllBlocksCleared(self) -> None:  # noqa: N802
        self.held.clear()


def test_a_router_knows_what_the_cache_holds(device: kvoffload.Device, seed: int) -> None:
    random = np.random.default_rng(seed)
    layout = kvoffload.KVLayout(
        [device.allocate_blocks(4, planes=2, block_bytes=64)], dtype="float16", tokens_per_block=4, block_axes=AXES
    )
    events, router = RouterEvents(4, rank=3), Router(4)
    index = CacheIndex(20, policy="lru", on_event=events)
    roots = [random.integers(0, 1000, 40) for _ in range(4)]
    for _ in range(200):
        tokens = roots[random.integers(4)][: random.integers(1, 41)]
        keys = kvoffload.chain_keys(tokens, layout=layout, salt="m")
        events.describe(keys, tokens)
        with index.reserve(keys):
            pass
        index.touch(keys)
        if random.random() < 0.1:
            index.remove(keys[-2:])
        if random.random() < 0.5 and (batch := events.take()) is not None:
            router.read(batch)
            assert router.held.get("CPU", set()) == set(map(hash_of, index.keys)), seed
            for each in keys:
                if each in index.keys:
                    end = 4 * (keys.index(each) + 1)
                    assert router.prefixes[hash_of(each)] == tuple(tokens[:end]), seed
    assert router.expected > 20
    assert (events.lost, events.not_described) == (0, 0)


def test_messages_as_arrays() -> None:
    events = RouterEvents(2, rank=1, form="array", clock=lambda: 12.5)
    events.describe([key(1), key(2), key(3)], [5, 6, 7, 8, 9, 10, 11])
    events(CacheEvent("stored", (key(1), key(2))))
    events(CacheEvent("evicted", (key(2), key(1))))
    events.cleared()
    first, second = hash_of(key(1)), hash_of(key(2))
    assert first > 1 << 63, "hashes are unsigned"
    assert events.take() == Batch(
        0,
        (
            12.5,
            [
                ("BlockStored", [first, second], None, [5, 6, 7, 8], 2, None, "CPU", None),
                ("BlockRemoved", [second, first], "CPU"),
                ("AllBlocksCleared",),
            ],
            1,
        ),
    )
    assert events.take() is None


def test_messages_as_maps() -> None:
    """The default."""
    events = RouterEvents(1, medium="GPU", clock=lambda: 1.0)
    assert events.form == "map"
    events.describe([key(1)], [5], parent=key(9), lora_name="chat")
    events(CacheEvent("promoted", (key(1),)))
    events(CacheEvent("evicted", (key(1),)))
    events.cleared()
    stored = {
        "type": "BlockStored",
        "block_hashes": [hash_of(key(1))],
        "parent_block_hash": hash_of(key(9)),
        "token_ids": [5],
        "block_size": 1,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": "chat",
        "locality": "LOCAL",
    }
    removed = {"type": "BlockRemoved", "block_hashes": [hash_of(key(1))], "medium": "GPU", "locality": "LOCAL"}
    assert events.take() == Batch(0, (1.0, [stored, removed, {"type": "AllBlocksCleared"}], 0))


@pytest.mark.parametrize("medium", ["STORAGE", "EXTERNAL"])
def test_where_a_store_is_stays_unsaid(medium: Medium) -> None:
    events = RouterEvents(1)
    events.describe([key(1)], [5])
    events.stored([key(1)], medium)
    events.removed([key(1)], medium)
    batch = taken_from(events)
    assert [(event["medium"], "locality" in event) for event in batch.payload[1]] == [(medium, False)] * 2


def test_keys_that_routers_were_not_told_of_are_not_reported_as_removed() -> None:
    events = RouterEvents(1)
    events.describe([key(1), key(2), key(3)], [1, 2, 3])
    events.stored([key(1), key(3), key(9)], "CPU")  # 3 waits for its parent, 9 was not described
    events.removed([key(1), key(2), key(3), key(9)], "CPU")
    events.removed([key(1)], "DISK")
    events.removed([key(1)], "CPU")
    batch = taken_from(events)
    gone = [event for event in batch.payload[1] if event["type"] == "BlockRemoved"]
    assert [(event["block_hashes"], event["medium"]) for event in gone] == [([hash_of(key(1))], "CPU")]


def shown(batch: Batch) -> list[tuple[int, int | None, list[int]]]:
    return [(len(event["block_hashes"]), event["parent_block_hash"], event["token_ids"]) for event in batch.payload[1]]


def test_a_message_names_keys_that_follow_each_other() -> None:
    events = RouterEvents(1)
    events.describe([key(each) for each in range(5)], range(5))
    events.describe([key(7)], [7], parent=key(4), lora_name="chat")
    events.stored([key(0), key(1), key(3), key(4), key(7)], "DISK")
    batch = taken_from(events)
    assert shown(batch) == [(2, None, [0, 1])], "the others wait for key 2"
    events.stored([key(2)], "CPU")
    batch = taken_from(events)
    assert shown(batch) == [(1, hash_of(key(1)), [2]), (2, hash_of(key(2)), [3, 4]), (1, hash_of(key(4)), [7])]


def test_keys_that_come_in_any_order_are_reported_behind_their_parents(seed: int) -> None:
    random = np.random.default_rng(seed)
    events, router, held = RouterEvents(1, rank=3), Router(1), set[int]()
    events.describe([key(each) for each in range(12)], range(12))
    for _ in range(300):
        number = int(random.integers(12))
        if number in held:
            events(CacheEvent("evicted", (key(number),)))
            held.remove(number)
        else:
            events(CacheEvent("promoted", (key(number),)))
            held.add(number)
        if (batch := events.take()) is not None:
            router.read(batch)
        leading = next(each for each in range(13) if each not in held)
        known = router.held.get("CPU", set())
        assert known <= {hash_of(key(each)) for each in held}, seed
        assert known >= {hash_of(key(each)) for each in range(leading)}, seed
    events.cleared()
    events(CacheEvent("promoted", (key(5),)))
    batch = taken_from(events)
    assert batch.payload[1] == [{"type": "AllBlocksCleared"}], seed


def test_what_was_not_described_is_counted_and_left_out() -> None:
    events = RouterEvents(1)
    events.describe([key(1)], [1])
    events(CacheEvent("stored", (key(5), key(1), key(6))))
    events(CacheEvent("stored", (key(5),)))
    for kind in ("hit", "miss", "declined", "failed"):
        events(CacheEvent(kind, (key(1),)))
    batch = taken_from(events)
    assert [event["block_hashes"] for event in batch.payload[1]] == [[hash_of(key(1))]]
    assert events.not_described == 3


def test_batches_are_kept_for_those_that_missed_them() -> None:
    events = RouterEvents(1, most_batches=3)
    taken: list[Any] = []
    for _ in range(5):
        events.cleared()
        taken.append(events.take())
    assert [batch.sequence for batch in taken] == [0, 1, 2, 3, 4]
    assert events.since(3) == taken[3:]
    assert events.since(0) == taken[2:], "a bounded number of them"


def test_lost_events_leave_a_gap_in_the_sequence() -> None:
    events = RouterEvents(1, most_pending=3, remembered=2)
    for _ in range(4):
        events.cleared()
    batch = taken_from(events)
    assert (batch.sequence, len(batch.payload[1]), events.lost) == (1, 1, 3)
    events.describe([key(1), key(2), key(3)], [1, 2, 3])
    events.stored([key(1), key(2)], "CPU")
    assert events.not_described == 1, "the latest two are remembered"


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens_per_key"):
        RouterEvents(0)
    with pytest.raises(ValueError, match="rank"):
        RouterEvents(1, rank=-1)
    with pytest.raises(ValueError, match="form must be map or array, got 'xml'"):
        RouterEvents(1, form="xml")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="medium must be one of GPU, CPU, DISK, STORAGE, EXTERNAL, got 'cpu'"):
        RouterEvents(1, medium="cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="token_ids"):
        RouterEvents(1).describe([key(1)], [1.5])
    with pytest.raises(ValueError, match="2 keys of 4 tokens each need 8 token_ids, got 7"):
        RouterEvents(4).describe([key(1), key(2)], range(7))
