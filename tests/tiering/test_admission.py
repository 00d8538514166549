"""WriteAdmission: what it may return, what it learns, what it remembers; no times."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from kvoffload.cache.tiering.admission import KeyMemory, Sighting, WriteAdmission

CAPACITY = 2_000


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Cache:
    """A host that keeps the keys stored last and a disk that keeps all, and what is true of them."""

    def __init__(self, admission: WriteAdmission, slots: int) -> None:
        self.admission = admission
        self._slots = slots
        self.host: dict[bytes, None] = {}
        self.disk: set[bytes] = set()
        self.writes: list[bytes] = []
        self.offered = 0

    def serve(self, keys: list[bytes]) -> int:
        """One request; how many keys were written."""
        found = next((place for place, each in enumerate(keys) if each not in self.host), len(keys))
        on_disk = []
        while found < len(keys) and (keys[found] in self.disk or keys[found] in self.host):
            on_disk += [keys[found]] if keys[found] not in self.host else []
            found += 1
        missing = [each for each in keys[found:] if each not in self.host]
        for each in keys:
            self.host.pop(each, None)
        self.host.update(dict.fromkeys(keys))
        self.admission.promoted(on_disk)
        self.admission.stored(missing)
        self.admission.written([each for each in missing if each in self.disk])
        while len(self.host) > self._slots:
            gone = next(iter(self.host))
            del self.host[gone]
            self.admission.left_host([gone])
        self.offered += len(missing)
        return self.write(self.admission.ended(keys))

    def write(self, keys: list[bytes]) -> int:
        assert self.host.keys() >= set(keys), "only what is in the host"
        assert self.disk.isdisjoint(keys), "nothing twice"
        assert len(set(keys)) == len(keys)
        self.disk.update(keys)
        self.writes += keys
        self.admission.written(keys)
        return len(keys)

    def lose(self, keys: list[bytes]) -> None:
        self.disk.difference_update(keys)
        self.admission.left_disk(keys)


def mixed_traffic(seed: int, requests: int) -> list[list[bytes]]:
    """Prompts that come again, in part or in whole, and such that never do."""
    random = np.random.default_rng(seed)
    prompts = [[key(1000 * prompt + place) for place in range(random.integers(1, 30))] for prompt in range(60)]
    traffic = []
    for number in range(requests):
        if random.integers(3):
            prompt = prompts[random.integers(len(prompts))]
            traffic.append(prompt[: random.integers(1, len(prompt) + 1)])
        else:
            traffic.append([key(10**9 + 100 * number + place) for place in range(random.integers(1, 40))])
    return traffic


@pytest.mark.parametrize("least_hits", [0, 0.22, 2])
def test_only_keys_in_the_host_and_not_on_the_disk_are_written(seed: int, least_hits: float) -> None:
    cache = Cache(WriteAdmission(200, least_hits=least_hits), slots=60)
    random = np.random.default_rng(seed)
    for request in mixed_traffic(seed, 400):
        cache.serve(request)
        if random.integers(4) == 0 and cache.disk:
            cache.lose(sorted(cache.disk)[: int(random.integers(1, 20))])
    assert cache.writes


def test_the_same_events_have_the_same_answers(seed: int) -> None:
    traffic = mixed_traffic(seed, 500)
    caches = [Cache(WriteAdmission(300), slots=80) for _ in range(2)]
    for request in traffic:
        counts = {cache.serve(request) for cache in caches}
        assert len(counts) == 1
    assert caches[0].writes == caches[1].writes


def test_memory_is_bounded(seed: int) -> None:
    admission = WriteAdmission(100, remembered=500)
    cache = Cache(admission, slots=50)
    most = 0
    for request in mixed_traffic(seed, 3000):
        cache.serve(request)
        most = max(most, len(admission._memory))
        assert len(admission._on_disk) == len(cache.host)
        assert admission._arrived <= admission._on_disk.keys()
        assert len(admission._sightings) <= 500 + 1024 + 40  # remembered, and those of one round of learning
    assert 250 <= most <= 500


def test_a_request_that_comes_again_and_again_takes_no_more_memory() -> None:
    admission, keys = WriteAdmission(CAPACITY), [key(number) for number in range(20)]
    admission.stored(keys)
    tracemalloc.start()
    for _ in range(2000):
        admission.ended(keys)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 150_000, "less than 75 bytes for each request"


def test_the_memory_forgets_the_oldest_keys_and_counts_them() -> None:
    memory, first, second = KeyMemory(8), Sighting(1, 0, 0), Sighting(1, 0, 1)
    keys = [key(number) for number in range(10)]
    first.live, second.live = 4, 4
    assert memory.see(keys[:4], [first] * 4) == []
    assert memory.see(keys[4:8], [second] * 4) == []
    assert len(memory) == 8
    first.live, second.live = 3, 6
    assert memory.see([keys[0], keys[8]], [second] * 2) == [(first, 3)]
    assert (first.live, second.live, len(memory)) == (0, 6, 6)
    assert memory.recall([keys[3], keys[7], keys[0]]) == [None, second, second]


def test_what_is_never_asked_for_again_is_written_at_first_and_then_no_more() -> None:
    cache = Cache(WriteAdmission(CAPACITY), slots=100)
    numbers = iter(range(10**6))
    written = [cache.serve([key(next(numbers)) for _ in range(20)]) for _ in range(1000)]
    assert all(count == 20 for count in written[:10])
    assert sum(written) <= CAPACITY
    assert sum(written[200:]) == 0


def repeat_at(cache: Cache, distance: int, requests: int, first: int) -> None:
    """Prompts of 20 blocks, each of which comes a second time after `distance` others."""
    for number in range(requests):
        for prompt in (number, number - distance):
            if prompt >= 0:
                cache.serve([key(first + 100 * prompt + place) for place in range(20)])


def test_it_adapts_when_traffic_changes() -> None:
    cache = Cache(WriteAdmission(CAPACITY), slots=100)
    numbers = iter(range(10**6))
    for _ in range(1000):
        cache.serve([key(next(numbers)) for _ in range(20)])
    assert cache.serve([key(next(numbers)) for _ in range(20)]) == 0
    cache.writes.clear()
    repeat_at(cache, 30, 600, first=10**7)
    before = len(cache.writes)
    repeat_at(cache, 30, 100, first=10**8)
    assert len(cache.writes) - before >= 0.9 * 100 * 20, "each block is written when it is stored for the first time"
    for _ in range(1500):
        cache.serve([key(next(numbers)) for _ in range(20)])
    assert cache.serve([key(next(numbers)) for _ in range(20)]) == 0


def test_a_second_use_is_written_when_the_first_is_not() -> None:
    cache = Cache(WriteAdmission(CAPACITY), slots=100)
    numbers = iter(range(10**6))
    for _ in range(500):
        cache.serve([key(next(numbers)) for _ in range(20)])
    prompt = [key(10**7 + place) for place in range(20)]
    assert cache.serve(prompt) == 0
    for _ in range(10):
        cache.serve([key(next(numbers)) for _ in range(20)])
    assert cache.serve(prompt) == 20


def test_ends_that_never_come_again_are_left_out() -> None:
    cache = Cache(WriteAdmission(CAPACITY), slots=100)
    for number in range(1500):
        for prompt in (number, number - 20):
            if prompt >= 0:
                shared = [key(10**7 + 100 * prompt + place) for place in range(10)]
                cache.serve([*shared, key(10**8 + 2 * number + (prompt == number))])
    lately = cache.writes[-2000:]
    ends = sum(each >= key(10**8) for each in lately)
    assert ends <= 0.01 * len(lately)
    assert len(cache.writes) >= 0.8 * 1500 * 10


def test_the_parameter_says_how_sparing(seed: int) -> None:
    written = []
    for least_hits in (0, 0.22, 0.5, 4):
        cache = Cache(WriteAdmission(400, least_hits=least_hits), slots=80)
        for request in mixed_traffic(seed, 1500):
            cache.serve(request)
        written.append(len(cache.writes))
    assert written == sorted(written, reverse=True)
    assert written[0] > 1.5 * written[-1] > 0


def test_a_key_that_the_host_does_not_hold_ends_what_is_written() -> None:
    admission = WriteAdmission(CAPACITY)
    keys = [key(number) for number in range(6)]
    admission.stored(keys)
    admission.left_host(keys[3:4])
    assert admission.ended(keys) == keys[:3]


def test_after_lost_events_the_host_holds_the_keys_that_it_is_told() -> None:
    admission = WriteAdmission(CAPACITY)
    keys = [key(number) for number in range(6)]
    admission.stored(keys[:4])
    admission.written(keys[:1])
    admission.resynchronise([*keys[:3], *keys[4:]])
    assert admission.ended(keys) == keys[1:3], "the first is on the disk still, the fourth has left the host"
    assert "5 keys in the host" in repr(admission)


def test_repeated_keys_count_once() -> None:
    admission = WriteAdmission(CAPACITY)
    admission.stored([key(1), key(2)])
    admission.stored([key(2)])
    assert admission.ended([key(1), key(2), key(1)]) == [key(1), key(2)]
    assert "2 keys in the host, 2 remembered" in repr(admission)
    assert admission.ended([]) == []


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"capacity": 0}, ValueError, "capacity must be .* at least 1, got 0"),
        ({"least_hits": -1}, ValueError, "least_hits must be a finite number of at least 0, got -1"),
        ({"least_hits": float("nan")}, ValueError, "least_hits must be a finite number of at least 0, got nan"),
        ({"least_hits": "much"}, TypeError, "least_hits must be a number, got 'much'"),
        ({"remembered": 0}, ValueError, "remembered must be .* at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        WriteAdmission(**{"capacity": 10, **arguments})  # type: ignore[arg-type]
