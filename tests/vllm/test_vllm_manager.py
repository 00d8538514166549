"""KVOffloadManager without vLLM's scheduler: lookups, stores, evictions, resets, failures, events and metrics."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from interrupts import Inside, count_points, interrupt
from vllm_parts import keys, request

from kvoffload.vllm import KVOffloadManager
from kvoffload.vllm.manager import Offers

A, B = keys(*range(8)), keys(*range(10, 18))


def stored(manager: KVOffloadManager, some: list[Any], context: Any) -> Any:
    output: Any = manager.prepare_store(some, context)
    manager.complete_store(set(output.keys_to_store), context)
    return output


def offered(manager: KVOffloadManager, some: list[Any], context: Any) -> list[Any]:
    """What of these keys is to be stored."""
    output: Any = manager.prepare_store(some, context)
    return list(output.keys_to_store)


def found(manager: KVOffloadManager, some: list[Any]) -> str:
    """A letter for each key: Miss, Hit, Pending."""
    names = [manager.lookup(key, request("asks")).name for key in some]
    return "".join("P" if name == "HIT_PENDING" else name[0] for name in names)


def test_a_store_is_pending_until_all_workers_have_ended_it() -> None:
    manager, context = KVOffloadManager(4), request("1", A)
    output: Any = manager.prepare_store(A[:3], context)
    assert output.keys_to_store == A[:3]
    assert sorted(output.store_spec.block_ids.tolist()) == [0, 1, 2]
    assert found(manager, A[:4]) == "PPPM"
    manager.complete_store(set(A[:2]), context)  # not all of it
    assert found(manager, A[:4]) == "PPPM"
    manager.complete_store({A[2]}, context)
    assert found(manager, A[:4]) == "HHHM"
    statistics = manager.index.statistics()
    assert (statistics.lookups, statistics.hits) == (12, 3)


def test_what_is_stored_or_under_way_is_not_stored_again() -> None:
    manager, one, two = KVOffloadManager(8), request("1", A), request("2", A)
    stored(manager, A[:2], one)
    first: Any = manager.prepare_store(A[:4], one)
    second: Any = manager.prepare_store(A[:5], two)
    assert (first.keys_to_store, second.keys_to_store) == (A[2:4], A[4:5])
    manager.complete_store(set(A[4:5]), two)
    assert found(manager, A[:5]) == "HHPPH"


def test_loads_hold_their_slots() -> None:
    manager, context = KVOffloadManager(4, policy="lru"), request("1", A, B)
    slots = stored(manager, A[:4], context).store_spec.block_ids.tolist()
    one: Any = manager.prepare_load([A[2], A[0]], request("2", A))
    two: Any = manager.prepare_load(A[:2], request("3", A))
    assert one.block_ids.tolist() == [slots[2], slots[0]]
    assert two.block_ids.tolist() == slots[:2]
    manager.on_request_finished(context)
    other = request("4", B)
    assert offered(manager, B[:2], other) == B[:1]  # one that is not being loaded
    assert manager.prepare_store(B[:3], other) is None  # vLLM asks again
    manager.complete_load({A[0], A[2]}, request("2", A))
    manager.complete_load(set(A[:2]), request("3", A))
    assert offered(manager, B[:3], other) == B[1:3]


def test_a_load_that_ends_frees_the_slots_that_it_has_read() -> None:
    """Not those of another request, which loads the same key from where it was stored again."""
    manager, first, second = KVOffloadManager(2, policy="lru"), request("1", A), request("2", A)
    stored(manager, A[:1], first)
    manager.on_request_finished(first)
    slots: list[int] = []
    for context in (first, second):
        load: Any = manager.prepare_load(A[:1], context)
        slots += load.block_ids.tolist()
        if context is first:
            manager.note_failed(slots)
            stored(manager, A[:1], context)
    manager.complete_load(set(A[:1]), first)
    output: Any = manager.prepare_store(B[:2], request("3", B))
    assert output.store_spec.block_ids.tolist() == slots[:1]
    assert slots[0] != slots[1]


@pytest.mark.parametrize("policy", ["prefix", "lru", "arc", "s3fifo"])
def test_the_tail_of_a_request_does_not_evict_its_head(policy: Any) -> None:
    manager, context = KVOffloadManager(4, policy=policy), request("1", A)
    for end in (2, 4, 6):
        stored(manager, A[:end], context)
    assert found(manager, A[:6]) == "HHHHMM"
    assert stored(manager, A, context).keys_to_store == []  # and vLLM does not offer them at each step for nothing


def test_a_context_may_come_again_after_its_request_has_ended() -> None:
    """As that of a request of which vLLM did not keep track."""
    manager, context = KVOffloadManager(4), request("1", A)
    manager.on_request_finished(context)
    manager.on_new_request(context)
    manager.on_request_finished(context)
    manager.on_request_finished(context)
    assert stored(manager, A[:2], context).keys_to_store == A[:2]


def test_groups_are_stored_in_the_order_of_their_tokens() -> None:
    """vLLM offers group after group; where not all fit, the heads of all groups are stored."""
    one, two = keys(1, 2, 3, group=0), keys(1, 2, 3, group=1)
    manager, context = KVOffloadManager(4), request("1", one, two)
    output: Any = manager.prepare_store(one + two, context)
    assert output.keys_to_store == one[:2] + two[:2]
    manager.complete_store(set(output.keys_to_store), context)
    again: Any = manager.prepare_load(one[:2] + two[:2], context)
    assert again.block_ids.tolist() == output.store_spec.block_ids.tolist()


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("pieces", [[1, 0], [0, 2, 1], [2, 1, 0]])
def test_a_request_gives_up_its_last_tokens_first_in_whatever_order_it_stored_them(
    pieces: list[int], finished: bool
) -> None:
    """A partial tail may be stored before what precedes it."""
    manager, context = KVOffloadManager(len(pieces), policy="lru"), request("1", A)
    for piece in pieces:
        stored(manager, [A[piece]], context)
    if finished:
        manager.on_request_finished(context)
    stored(manager, B[:1], request("2", B))
    assert found(manager, A[: len(pieces)]) == "H" * (len(pieces) - 1) + "M"


@pytest.mark.parametrize("touched", [False, True])
def test_keys_that_are_offered_or_touched_while_they_are_there_are_used_by_that_request(touched: bool) -> None:
    manager, first, second = KVOffloadManager(4, policy="lru"), request("1", A), request("2", B)
    stored(manager, A[:2], first)
    manager.on_request_finished(first)
    stored(manager, B[:2], second)
    manager.on_request_finished(second)
    if touched:
        manager.touch(A[:2], request("3", A))
    else:
        assert offered(manager, A[:2], request("3", A)) == []
    stored(manager, keys(20), request("4", keys(20)))
    assert found(manager, A[:2] + B[:2]) == "HHHM"


def test_a_failed_store_is_missing() -> None:
    manager, context = KVOffloadManager(4, enable_events=True), request("1", A)
    first: Any = manager.prepare_store(A[:2], context)
    second: Any = manager.prepare_store(A[2:4], context)
    manager.note_failed({int(first.store_spec.block_ids[0])})
    manager.complete_store(set(A[:2]), context)
    manager.complete_store(set(A[2:4]), context)
    assert found(manager, A[:4]) == "MMHH"
    manager.complete_store(offered(manager, A[:2], context), context, success=False)
    assert found(manager, A[:4]) == "MMHH"
    events = [(event.removed, event.metadata_only, event.keys) for event in manager.take_events()]
    assert events == [(True, True, A[:2]), (False, False, A[2:4]), (True, True, A[:2])]
    assert len(second.keys_to_store) == 2


def test_a_failed_load_makes_its_keys_missing() -> None:
    """Else the request, which is computed again, would load them again, and fail again."""
    manager, context = KVOffloadManager(4), request("1", A)
    slots = stored(manager, A[:3], context).store_spec.block_ids.tolist()
    manager.prepare_load(A[:2], context)
    manager.note_failed(slots[:2])
    assert found(manager, A[:3]) == "MMH"
    manager.complete_load(set(A[:2]), context)
    assert manager.index.statistics().pinned == 0


def test_a_failure_of_before_a_reset_concerns_no_later_store() -> None:
    manager, context = KVOffloadManager(8), request("1", A)
    before: Any = manager.prepare_store(A[:2], context)
    manager.reset_cache()
    again: Any = manager.prepare_store(A[:2], request("2", A))
    assert set(before.store_spec.block_ids.tolist()).isdisjoint(again.store_spec.block_ids.tolist())
    manager.note_failed(before.store_spec.block_ids.tolist())
    manager.complete_store(set(A[:2]), context)
    assert found(manager, A[:2]) == "HH"


def test_slots_of_before_a_reset_are_free_once_it_is_flushed() -> None:
    manager, context = KVOffloadManager(4), request("1", A)
    stored(manager, A[:2], context)
    manager.prepare_load(A[:2], context)
    manager.prepare_store(A[2:4], context)
    manager.reset_cache()
    assert found(manager, A[:4]) == "MMMM"
    other = request("2", B)
    assert manager.prepare_store(B[:2], other) is None
    manager.on_reset_flushed()
    assert len(stored(manager, B[:4], other).keys_to_store) == 4
    manager.index.check()


def test_windowed_groups_of_requests_that_saw_a_reset_are_not_stored() -> None:
    full, window = keys(1, 2, group=0), keys(1, 2, group=1)
    manager, old = KVOffloadManager(8, windowed_groups=[1]), request("1", full, window)
    manager.on_new_request(old)
    assert len(stored(manager, full + window, old).keys_to_store) == 4
    manager.reset_cache()
    manager.on_reset_flushed()
    assert stored(manager, full + window, old).keys_to_store == full
    new = request("2", full, window)
    manager.on_new_request(new)
    assert stored(manager, full + window, new).keys_to_store == window


def test_an_index_of_no_slots_stores_nothing() -> None:
    manager, context = KVOffloadManager(0), request("1", A)
    assert stored(manager, A, context).keys_to_store == []
    assert found(manager, A[:2]) == "MM"
    assert manager.get_stats() is not None


def test_events_are_of_keys_that_come_and_go() -> None:
    manager, context = KVOffloadManager(2, policy="lru", enable_events=True), request("1", A)
    stored(manager, A[:2], context)
    manager.on_request_finished(context)
    stored(manager, B[:1], request("2", B))
    events = [(event.removed, event.keys) for event in manager.take_events()]
    assert events == [(False, A[:2]), (True, [A[1]]), (False, B[:1])]
    assert list(manager.take_events()) == []
    stored(manager, B[1:2], request("3", B))
    manager.reset_cache()
    assert list(manager.take_events()) == []  # vLLM has an event for that, and publishes it before these


def test_a_failed_store_that_is_tried_again_is_not_reported_as_gone() -> None:
    manager, context = KVOffloadManager(2, enable_events=True), request("1", A)
    manager.prepare_store(A[:2], context)
    manager.complete_store(set(A[:2]), context, success=False)
    manager.prepare_store(A[:1], context)
    assert [event.keys for event in manager.take_events()] == [[A[1]]]


def test_metrics_count_from_one_report_to_the_next() -> None:
    manager, context = KVOffloadManager(4), request("1", A)
    manager.prepare_store(A[:2], context)
    values = manager.get_stats().reduce()
    assert values["vllm:kv_offload_cpu_cache_write_usage_perc"] == 0.5
    assert (values["vllm:kv_offload_cpu_allocation_size_count"], values["vllm:kvoffload_pending_chunks"]) == (1, 2)
    manager.complete_store(set(A[:2]), context)
    found(manager, A[:3])
    values = manager.get_stats().reduce()
    assert values["vllm:kvoffload_stored_chunks"] == 2
    assert (values["vllm:kvoffload_lookups_chunks"], values["vllm:kvoffload_hits_chunks"]) == (3, 2)
    assert "vllm:kvoffload_stored_chunks" not in manager.get_stats().reduce()


def test_what_is_offered_once_is_not_stored() -> None:
    manager, context = KVOffloadManager(8, store_threshold=2), request("1", A)
    assert stored(manager, A[:2], context).keys_to_store == []
    assert stored(manager, A[:4], context).keys_to_store == A[:2]
    assert manager.get_stats().reduce()["vllm:kv_offload_stores_skipped"] == 4


def test_offers_are_counted_for_few_keys() -> None:
    offers = Offers(2, most=2)
    for some in (A[:1], A[1:2], A[2:3], A[:1]):
        offers.note(some)
    assert offers.passing(A[:3]) == []  # the first was forgotten
    offers.note(A[:4])  # those at hand do not displace each other
    assert offers.passing(A[:4]) == [A[0], A[2]]
    assert offers.take_skipped() == 5


def test_the_manager_says_where_chunks_come_from() -> None:
    manager = KVOffloadManager(4, info={"kvoffload_policy": "prefix"})
    assert manager.get_load_source(A[0], request("1")).value == "host"
    assert manager.config_info() == [{"kvoffload_policy": "prefix"}]
    manager.touch([A[0], A[0]], request("1"))


def test_a_request_that_touches_its_keys_uses_them_once() -> None:
    manager, context = KVOffloadManager(4), request("1", A)
    stored(manager, A[:2], context)
    manager.touch(A[:2], context)
    manager.touch(A[:2], context)
    assert sum(manager.index.statistics().reuse_distance_blocks.counts) == 0
    manager.on_request_finished(context)
    assert sum(manager.index.statistics().reuse_distance_blocks.counts) == 0
    again = request("2", A)
    manager.touch(A[:2], again)
    manager.on_request_finished(again)
    assert sum(manager.index.statistics().reuse_distance_blocks.counts) == 2


def _prepared_load(manager: KVOffloadManager, context: Any) -> None:
    manager.prepare_load(A[:2], context)


def _prepared_store(manager: KVOffloadManager, context: Any) -> None:
    manager.prepare_store(B[:2], context)


INTERRUPTED: dict[str, tuple[Any, Any]] = {  # what is done before, and the call
    "prepare_store": (None, _prepared_store),
    "complete_store": (_prepared_store, lambda manager, context: manager.complete_store(set(B[:2]), context)),
    "failed store": (_prepared_store, lambda manager, context: manager.complete_store(set(B[:2]), context, False)),
    "prepare_load": (None, _prepared_load),
    "complete_load": (_prepared_load, lambda manager, context: manager.complete_load(set(A[:2]), context)),
    "touch": (None, lambda manager, context: manager.touch(A[:2], context)),
}


@pytest.mark.parametrize("name", INTERRUPTED)
def test_pitfall_39_an_interrupted_call_keeps_no_slot_beyond_a_reset(name: str) -> None:
    """At every point: a key that hits has been stored; after a reset all slots are free, and none is given twice."""
    prepare, call = INTERRUPTED[name]

    def begun() -> tuple[KVOffloadManager, Any]:
        manager, before = KVOffloadManager(4), request("0", A)
        stored(manager, A[:2], before)
        manager.on_request_finished(before)
        context = request("1", A, B)
        if prepare is not None:
            prepare(manager, context)
        return manager, context

    points = count_points(partial(call, *begun()), Inside("kvoffload"))
    assert points > 5
    for nth in range(1, points + 1):
        manager, context = begun()
        where = interrupt(partial(call, manager, context), nth)
        hits = found(manager, A[:2] + B[:2])
        assert hits[:2] == "HH", where
        assert "H" not in hits[2:] or name == "complete_store", where
        manager.index.check()
        manager.reset_cache()
        manager.on_reset_flushed()
        again = request("2", keys(*range(20, 24)))
        output: Any = manager.prepare_store(keys(*range(20, 24)), again)
        assert sorted(output.store_spec.block_ids.tolist()) == [0, 1, 2, 3], where
        manager.complete_store(set(keys(*range(20, 24))), again)
        statistics = manager.index.statistics()
        assert (statistics.resident, statistics.pending, statistics.pinned) == (4, 0, 0), where
        manager.index.check()


def test_what_an_interrupted_store_has_reserved_is_free_for_the_next_one() -> None:
    """Without a reset, but for the last points, at which the manager has taken note of the store."""
    free: list[bool] = []
    where: str | None = "nowhere yet"
    while where is not None:
        manager, context = KVOffloadManager(2), request("1", A)
        where = interrupt(partial(manager.prepare_store, A[:2], context), len(free) + 1, "kvoffload/vllm/manager")
        output: Any = manager.prepare_store(B[:2], request("2", B))
        free.append(output is not None and output.keys_to_store == B[:2])
        manager.index.check()
    assert free == sorted(free, reverse=True)
    assert len(free) > 10
    assert free.count(False) <= 5
