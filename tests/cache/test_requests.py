"""Open requests: keys that come in pieces, none of which is evicted for another of the same request. No device."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from types import FrameType
from typing import Any

import numpy as np
import pytest
from helpers import in_threads, key, keys
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import Fifo

from kvoffload import CacheIndex, CacheRequest, CapacityError, ClosedError, Reservation, Status, Tenant
from kvoffload.cache.policies import POLICIES, Prefix, Protected

EVERY: list[Any] = [*POLICIES, Fifo]
WHOLE_ORDER = ["prefix", "lru", "arc"]  # these keep their keys in an order that follows uses


@pytest.fixture(params=EVERY, ids=str)
def policy(request: pytest.FixtureRequest) -> Any:
    return request.param


def stored(index: CacheIndex, *numbers: int, request: CacheRequest | None = None) -> Reservation:
    reservation = index.reserve(keys(*numbers), request=request)
    reservation.commit()
    return reservation


def hits(index: CacheIndex, *numbers: int) -> list[int]:
    return [number for number in numbers if index.status([key(number)]) == [Status.HIT]]


# the guarantee


def test_the_tail_of_a_request_does_not_evict_its_head(policy: Any) -> None:
    index = CacheIndex(6, policy=policy)
    stored(index, 100, 101)
    request = index.open_request()
    for number in range(6):
        assert stored(index, number, request=request).keys == (key(number),)
    assert hits(index, *range(6)) == list(range(6))
    last = index.reserve(keys(6, 7), request=request)
    assert (last.keys, last.declined, last.evicted, last.short) == ((), tuple(keys(6, 7)), (), True)
    with pytest.raises(CapacityError):
        index.reserve(keys(6, 7), request=request, all_or_nothing=True)
    assert request.keys == tuple(keys(*range(8)))
    index.check()


def test_without_a_handle_it_does(policy: Any) -> None:
    """The test above can fail."""
    index = CacheIndex(4, policy=policy)
    evicted = [each for number in range(6) for each in stored(index, number).evicted]
    assert set(evicted) & set(keys(0, 1, 2, 3))


def test_as_many_keys_of_a_piece_as_find_room_are_stored(policy: Any) -> None:
    index = CacheIndex(8, policy=policy)
    stored(index, 100, 101, 102)
    with index.open_request() as request:
        stored(index, 0, 1, 2, 3, 4, request=request)
        reservation = stored(index, 5, 6, 7, 8, 9, request=request)
    assert reservation.keys == tuple(keys(5, 6, 7))
    assert reservation.declined == tuple(keys(8, 9))
    assert set(reservation.evicted) == set(keys(100, 101, 102))


def test_a_head_that_was_loaded_stays(policy: Any) -> None:
    index = CacheIndex(4, policy=policy)
    stored(index, 0, 1)
    stored(index, 100, 101)
    request = index.open_request()
    index.load(keys(0, 1, 50), request=request)
    assert request.keys == tuple(keys(0, 1, 50))
    assert set(stored(index, 2, 3, request=request).evicted) == set(keys(100, 101))
    assert stored(index, 4, request=request).keys == ()
    assert hits(index, 0, 1, 2, 3) == [0, 1, 2, 3]


def test_a_longer_list_names_keys_that_are_there(policy: Any) -> None:
    """Keys that the request has neither stored nor loaded, since the device has them, become its own, too."""
    index = CacheIndex(4, policy=policy)
    stored(index, 0, 1)
    stored(index, 100, 101)
    request = index.open_request()
    reservation = stored(index, 0, 1, 2, request=request)
    assert (reservation.keys, reservation.present) == ((key(2),), tuple(keys(0, 1)))
    stored(index, 3, request=request)
    assert stored(index, 4, request=request).keys == ()
    assert hits(index, 0, 1, 2, 3) == [0, 1, 2, 3]


def test_other_requests_may_evict_them_unless_they_are_leased(policy: Any) -> None:
    index = CacheIndex(4, policy=policy)
    request = index.open_request()
    stored(index, 0, 1, 2, 3, request=request)
    with index.acquire(keys(0, 1)):
        assert set(stored(index, 100, 101).evicted) == set(keys(2, 3))
    assert stored(index, 2, request=request).evicted in ((key(100),), (key(101),))
    index.check()


def test_a_policy_that_names_its_keys_is_refused() -> None:
    class Spiteful(Fifo):
        def victims(self, count: int, protected: Protected) -> list[bytes] | None:
            del protected
            return super().victims(count, lambda _: False)

    index = CacheIndex(2, policy=Spiteful)
    request = index.open_request()
    stored(index, 0, request=request)
    stored(index, 1, request=request)
    with pytest.raises(ValueError, match="has to stay"):
        index.reserve(keys(2), request=request)
    assert hits(index, 0, 1) == [0, 1]
    assert request.keys == tuple(keys(0, 1)), "what was refused does not belong to it"


@pytest.mark.parametrize("tenant", ["quota", "low"])
def test_tenants(policy: Any, tenant: str) -> None:
    """Within a quota the request's own keys stay; keys of another pool that it has loaded stay, too."""
    index = CacheIndex(6, policy=policy, tenants={"quota": Tenant(max_blocks=3), "low": Tenant(priority=-1)})
    index.reserve(keys(100), tenant="low").commit()
    with index.open_request(tenant=tenant) as request:
        assert request.tenant == tenant
        index.load(keys(100), request=request)
        for number in range(7):
            reservation = index.reserve(keys(number), tenant=tenant if number % 2 else "", request=request)
            assert reservation.evicted == ()
            assert reservation.tenant == tenant
            reservation.commit()
    most = 3 if tenant == "quota" else 5
    assert hits(index, 100, *range(7)) == [100, *range(most)]
    index.check()


@pytest.mark.parametrize("policy", EVERY, ids=str)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 3),
            st.lists(st.integers(0, 15), min_size=1, max_size=5, unique=True),
            st.sampled_from(["reserve", "reserve", "reserve", "load", "lease", "remove", "clear", "touch", "end"]),
        ),
        max_size=60,
    ),
    groups=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_no_call_of_a_request_evicts_its_keys(
    policy: Any, steps: list[tuple[int, list[int], str]], groups: bool
) -> None:
    """Three open requests, two of which have tenants, and calls without one, against the keys that each was given."""
    tenants = {"quota": Tenant(max_blocks=4), "high": Tenant(priority=1)} if groups else {}
    index = CacheIndex(7, policy=policy, tenants=tenants)
    names = ["", *(tenants or ("", ""))]
    requests = [index.open_request(tenant=name) for name in names]
    own: list[list[bytes]] = [[], [], []]
    leases: list[Any] = []
    for which, numbers, what in steps:
        request = requests[which] if which < 3 else None
        mine = own[which] if which < 3 else []
        named = keys(*numbers)
        before = set(index.keys)
        if what == "reserve":
            reservation = index.reserve(named, request=request)
            assert not set(reservation.evicted) & {*mine, *named}
            assert set(mine) & before <= set(index.keys)
            (reservation.commit if numbers[0] % 4 else reservation.abort)()
            mine += named
        elif what == "load":
            index.load(named, request=request)
            mine += named
        elif what == "lease":
            leases.append(index.acquire([each for each in named if index.status([each]) == [Status.HIT]]))
        elif what == "remove":
            index.remove(named)
        elif what == "clear" and numbers[0] == 0:
            index.clear()
        elif what == "touch":
            index.touch(named)
        elif what == "end" and request is not None:
            assert request.keys == tuple(dict.fromkeys(mine))
            request.end()
            requests[which], own[which] = index.open_request(tenant=names[which]), []
        index.check()
    for lease in leases:
        lease.release()
    index.check()


# positions


@pytest.mark.parametrize("policy", WHOLE_ORDER)
@pytest.mark.parametrize("pieces", [(12,), (4, 4, 4), (1,) * 12, (5, 1, 6)])
def test_a_request_in_pieces_is_ordered_like_one_in_one_call(policy: Any, pieces: tuple[int, ...]) -> None:
    """Of a request that has ended, whether or not others came in between."""

    def order(*pieces: int, handle: bool) -> list[bytes]:
        index = CacheIndex(24, policy=policy)
        stored(index, 100, 101, 102)
        index.touch(keys(100, 101, 102))
        request = index.open_request() if handle else None
        index.load(keys(100), request=request)
        begin = 0
        for count in pieces:
            stored(index, *range(begin, begin + count), request=request)
            begin += count
        stored(index, 200, 201)
        if request is None:
            index.touch(keys(100, *range(12)))
        else:
            request.end()
        return list(index._state.pools.all[0].policy)

    assert order(*pieces, handle=True) == order(12, handle=False)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [1, 4, 16])
def test_the_deepest_keys_of_an_open_request_are_evicted_first(policy: Any, size: int) -> None:
    """When another request needs their entries."""
    index = CacheIndex(32, policy=policy)
    request = index.open_request()
    for begin in range(0, 32, size):
        stored(index, *range(begin, begin + size), request=request)
    assert index.reserve(keys(100, 101, 102, 103)).evicted == tuple(keys(31, 30, 29, 28))


@pytest.mark.parametrize("how", ["store", "load"])
@pytest.mark.parametrize("policy", WHOLE_ORDER)
def test_an_open_request_is_as_recent_as_its_latest_piece(policy: Any, how: str) -> None:
    """With all of its keys, so that what another request has used in between is evicted before any of them."""
    index = CacheIndex(6, policy=policy)

    def call(*numbers: int, request: CacheRequest) -> None:
        if how == "store":
            stored(index, *numbers, request=request)
        else:
            index.load(keys(*numbers), request=request)

    if how == "load":
        for number in (0, 100, 2):
            stored(index, number, number + 1)
    request, other = index.open_request(), index.open_request()
    call(0, 1, request=request)
    call(100, 101, request=other)
    call(2, 3, request=request)
    assert set(index.reserve(keys(200, 201)).evicted) == set(keys(100, 101))


def test_prefix_takes_no_piece_for_the_end_of_a_request() -> None:
    """Ends of requests are evicted before the rest: after `end` that is the last key, and before it none."""
    index = CacheIndex(16)
    stored(index, *range(100, 104))
    index.touch(keys(*range(100, 104)))
    with index.open_request() as request:
        for begin in range(0, 12, 4):
            stored(index, *range(begin, begin + 4), request=request)
        assert next(iter(index._state.pools.all[0].policy)) == key(103)
    assert {*list(index._state.pools.all[0].policy)[:2]} == {key(103), key(11)}


def test_prefix_has_no_key_twice_when_keys_come_back() -> None:
    """A failed store of an earlier piece, stored again; and keys evicted by others, stored again."""
    index = CacheIndex(12)
    request = index.open_request()
    first = index.reserve(keys(0, 1, 2, 3), request=request)
    stored(index, 4, 5, 6, 7, request=request)
    first.abort()
    stored(index, 0, 1, 2, 3, request=request)
    index.remove(keys(5))
    stored(index, 5, 8, request=request)
    with index.acquire(keys(8)):
        index.reserve(keys(*range(100, 108))).abort()
    stored(index, *range(9), request=request)
    order = list(index._state.pools.all[0].policy)
    assert len(order) == len(set(order)) == len(index)
    index.check()


def test_lru_keeps_a_loaded_head_before_the_tail() -> None:
    index = CacheIndex(8, policy="lru")
    stored(index, 0, 1)
    stored(index, 100, 101)
    request = index.open_request()
    index.load(keys(0, 1), request=request)
    stored(index, 2, 3, request=request)
    index.load(keys(100))
    policy = index._state.pools.all[0].policy
    assert list(policy) == keys(101, 3, 2, 1, 0, 100)
    index.load(keys(1))
    index.remove(keys(0, 2, 3))
    assert list(policy) == keys(101, 100, 1)
    assert len(policy) == 3
    stored(index, 4, 5, request=request)
    assert list(policy) == keys(101, 100, 1, 5, 4)
    request.end()
    assert list(policy) == keys(101, 100, 5, 4, 1)
    index.check()


def test_a_key_that_a_request_loads_again_is_used_once() -> None:
    """A request that was preempted loads its own keys: that is no second use."""
    uses = []
    for again in (False, True):
        index = CacheIndex(8, policy="s3fifo")
        stored(index, 0, 1)
        with index.open_request() as request:
            index.load(keys(0, 1), request=request)
            if again:
                index.load(keys(0, 1), request=request)
        policy: Any = index._state.pools.all[0].policy
        uses.append(dict(policy._small))
    assert uses[0] == uses[1]


# its life


def test_end_touches_its_keys_once(policy: Any) -> None:
    touched: list[list[bytes]] = []
    maker = POLICIES.get(policy, policy)

    class Noting(maker):  # type: ignore[misc, valid-type]
        def touch(self, keys: Sequence[bytes]) -> None:
            touched.append(list(keys))
            super().touch(keys)

    index = CacheIndex(8, policy=Noting)
    with index.open_request() as request:
        stored(index, 2, 3, request=request)
        index.load(keys(9, 3), request=request)
        stored(index, 4, request=request)
    request.end()
    assert touched == [keys(2, 3, 9, 4)]
    assert request.ended


def test_an_ended_request_is_refused() -> None:
    index = CacheIndex(4)
    request = index.open_request()
    assert repr(request) == "CacheRequest(0 keys, open)"
    request.end()
    assert repr(request) == "CacheRequest(0 keys, ended)"
    for call in (partial(index.reserve, keys(0)), partial(index.load, keys(0))):
        with pytest.raises(ClosedError, match="the request of 0 keys has ended"):
            call(request=request)
    assert len(index) == 0


def test_an_exception_ends_it_without_a_touch() -> None:
    index = CacheIndex(4)
    request = index.open_request()
    stored(index, 0, request=request)
    with pytest.raises(ZeroDivisionError), request:
        raise ZeroDivisionError
    assert request.ended
    assert index.statistics().reuse_distance_blocks.total == 0
    assert index._state.recorder._touched_at[0] == 0


def test_a_dropped_request_leaves_nothing_behind(policy: Any) -> None:
    index = CacheIndex(4, policy=policy)
    request = index.open_request()
    stored(index, 0, 1, 2, 3, request=request)
    gone: list[bool] = []
    watch = weakref.finalize(request, gone.append, True)
    del request
    gc.collect()
    assert gone == [True]
    assert not watch.alive
    assert len(stored(index, 10, 11, 12, 13).keys) == 4
    index.check()


def test_keys_that_are_removed_stay_its_own(policy: Any) -> None:
    index = CacheIndex(3, policy=policy)
    request = index.open_request()
    stored(index, 0, 1, request=request)
    index.remove(keys(0))
    index.clear()
    stored(index, 0, 100)
    assert stored(index, 1, 2, request=request).evicted == (key(100),)
    assert hits(index, 0, 1, 2) == [0, 1, 2]
    index.check()


def test_wrong_requests_are_refused() -> None:
    index, other = CacheIndex(4, tenants={"a": Tenant()}), CacheIndex(4)
    wrong: Any = "request"
    with pytest.raises(TypeError, match="open_request"):
        index.reserve(keys(0), request=wrong)
    with pytest.raises(ValueError, match="of this cache"):
        index.reserve(keys(0), request=other.open_request())
    with pytest.raises(ValueError, match="of this cache"):
        index.load(keys(0), request=other.open_request())
    with pytest.raises(ValueError, match="the request's"):
        index.reserve(keys(0), tenant="a", request=index.open_request())
    with pytest.raises(ValueError, match="tenant must be one of"):
        index.open_request(tenant="b")
    assert len(index) == 0


def test_a_policy_that_raises_leaves_an_open_request_usable() -> None:
    """The policy is created again, and knows nothing of what it has noted of the request."""
    calls = iter([False, False, True, False, False, False])

    class Failing(Prefix):
        def _use(self, *given: Any, **options: Any) -> None:
            super()._use(*given, **options)
            if next(calls, False):
                raise ZeroDivisionError

    index = CacheIndex(8, policy=Failing)
    request = index.open_request()
    stored(index, 0, 1, request=request)
    stored(index, 2, 3, request=request)
    with pytest.raises(ZeroDivisionError):
        index.reserve(keys(4, 5), request=request)
    index.check()
    stored(index, 4, 5, request=request)
    stored(index, 6, 7, request=request)
    assert hits(index, *range(8)) == list(range(8))
    assert stored(index, 8, request=request).keys == ()
    index.check()


# what it costs


def _calls(call: Callable[[], object]) -> int:
    """How many Python functions of the cache it enters."""
    count = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and "kvoffload/cache/" in frame.f_code.co_filename

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("others", [0, 64, 512])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_piece_costs_the_same_at_any_depth(policy: Any, others: int) -> None:
    """With room, with keys of others that are used often, and where nothing but the request's keys is left.

    The median, as S3-FIFO now and then gives each key of its main queue another round.
    """
    index = CacheIndex(1024, policy=policy)
    hot = range(10_000, 10_000 + others)
    for _ in range(6):
        stored(index, *hot)
        index.touch(keys(*hot))
    request = index.open_request()
    costs = []
    for begin in range(0, 1600, 16):
        piece = keys(*range(begin, begin + 16))
        costs.append(_calls(lambda piece=piece: index.reserve(piece, request=request).commit()))  # type: ignore[misc]
    assert median(costs[64:]) <= 6 * costs[2], costs  # the first 64 fill the entries


# threads


@pytest.mark.usefixtures("restless")
def test_requests_of_several_threads(policy: Any, seed: int) -> None:
    """No thread's reservation evicts a key of its request, and one request may be used by two threads."""
    index = CacheIndex(24, policy=policy)
    shared = index.open_request()

    def serve(number: int) -> None:
        rng = np.random.default_rng([seed, number])
        for _ in range(12):
            with index.open_request() as request:
                index.load(keys(0, 1), request=request)
                for _ in range(6):
                    mine = shared if number < 2 else request
                    piece = keys(*sorted(int(each) for each in rng.permutation(60)[: rng.integers(1, 5)]))
                    before = set(mine.keys)
                    reservation = index.reserve(piece, request=mine)
                    assert not before & set(reservation.evicted)
                    reservation.commit()
                    index.check()

    in_threads(*(partial(serve, number) for number in range(4)))
    shared.end()
    index.check()
