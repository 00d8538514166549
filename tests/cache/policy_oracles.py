"""Policies once more, from the papers' descriptions and with plain lists; and a driver that holds both side by side.

Nothing here is shared with `kvoffload.cache.policies`. In all lists the newest key comes first, as
the papers draw them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from typing import NamedTuple

from kvoffload.cache.policies import ARC, LRU, S3FIFO, Policy

Given = tuple[int, list[bytes]]  # how many of the newcomers are worth storing, and what was given up for them


class Oracle(ABC):
    """What a policy should do. Here keys are given up at once; `deepcopy` first to see what would be."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.counted: set[bytes] = set()  # inserted or loaded since their last touch

    @abstractmethod
    def resident(self) -> list[bytes]:
        """In the order of the policy's `__iter__`."""

    @abstractmethod
    def insert(self, keys: Sequence[bytes]) -> None: ...

    @abstractmethod
    def use(self, key: bytes) -> None:
        """A resident key has been used."""

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> None:
        """Not for others: nothing remembers them."""

    @abstractmethod
    def give_up_for(self, newcomers: Sequence[bytes], room: int, protected: Collection[bytes]) -> Given | None:
        """Give up what has to go for newcomers; None, and nothing has changed: too few may. `room` may be below 0."""

    def renew(self, key: bytes) -> None:
        """A resident key's request has ended, its use is counted already."""
        assert key in self.resident()

    def give_up(self, count: int, protected: Collection[bytes]) -> list[bytes] | None:
        given = self.give_up_for([], -count, protected)
        return None if given is None else given[1]

    def load(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self.use(key)
            self.counted.add(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self.resident():
                if key in self.counted:
                    self.renew(key)
                else:
                    self.use(key)
                self.counted.discard(key)

    def too_few(self, count: int, protected: Collection[bytes]) -> bool:
        return len([key for key in self.resident() if key not in protected]) < count


class LRUOracle(Oracle):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.stack: list[bytes] = []

    def resident(self) -> list[bytes]:
        return self.stack[::-1]

    def insert(self, keys: Sequence[bytes]) -> None:
        self.stack = [*keys, *self.stack]

    def use(self, key: bytes) -> None:
        self.stack = [key] + [other for other in self.stack if other != key]

    def renew(self, key: bytes) -> None:
        self.use(key)

    def remove(self, keys: Sequence[bytes]) -> None:
        self.stack = [key for key in self.stack if key not in keys]

    def give_up_for(self, newcomers: Sequence[bytes], room: int, protected: Collection[bytes]) -> Given | None:
        count = max(0, len(newcomers) - room)
        if self.too_few(count, protected):
            return None
        victims = [key for key in reversed(self.stack) if key not in protected][:count]
        self.remove(victims)
        return len(newcomers), victims


class ARCOracle(Oracle):
    """Megiddo and Modha 2003, figure 4, with p in whole pages."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.t1: list[bytes] = []
        self.t2: list[bytes] = []
        self.b1: list[bytes] = []
        self.b2: list[bytes] = []
        self.p = 0

    def resident(self) -> list[bytes]:
        return self.t1[::-1] + self.t2[::-1]

    def insert(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self.counted.add(key)
            self.p = self.adapted(self.p, key, self.b1, self.b2)
            if key in self.b1 + self.b2:
                (self.b1 if key in self.b1 else self.b2).remove(key)
                self.t2.insert(0, key)
            else:
                self.t1.insert(0, key)
            while len(self.t1 + self.b1) > self.capacity and self.b1:
                self.b1.pop()
            while len(self.t1 + self.t2 + self.b1 + self.b2) > 2 * self.capacity and self.b2:
                self.b2.pop()

    def adapted(self, p: int, key: bytes, b1: list[bytes], b2: list[bytes]) -> int:
        if key in b1:
            return min(p + (1 if len(b1) >= len(b2) else len(b2) // len(b1)), self.capacity)
        if key in b2:
            return max(p - (1 if len(b2) >= len(b1) else len(b1) // len(b2)), 0)
        return p

    def use(self, key: bytes) -> None:
        self.remove([key])
        self.t2.insert(0, key)

    def renew(self, key: bytes) -> None:
        where = self.t1 if key in self.t1 else self.t2
        where.remove(key)
        where.insert(0, key)

    def remove(self, keys: Sequence[bytes]) -> None:
        self.t1 = [key for key in self.t1 if key not in keys]
        self.t2 = [key for key in self.t2 if key not in keys]
        self.counted -= set(keys)

    def give_up_for(self, newcomers: Sequence[bytes], room: int, protected: Collection[bytes]) -> Given | None:
        if self.too_few(len(newcomers) - room, protected):
            return None
        b1, b2, p, arrived = list(self.b1), list(self.b2), self.p, 0
        victims = [self.replace(len(self.t1), p, False, protected) for _ in range(-room)]
        for free, key in zip(range(room, room - len(newcomers), -1), reversed(newcomers), strict=True):
            p = self.adapted(p, key, b1, b2)
            if free <= 0:
                victims.append(self.replace(len(self.t1) + arrived, p, key in b2, protected))
            if key not in b1 + b2:
                arrived += 1
        return len(newcomers), victims

    def replace(self, size: int, p: int, in_b2: bool, protected: Collection[bytes]) -> bytes:
        """REPLACE(x, p), with so many keys in T1."""
        lists = [(self.t1, self.b1), (self.t2, self.b2)]
        if not (size > p or (in_b2 and size == p)):
            lists.reverse()
        for resident, ghosts in lists:
            for key in reversed(resident):
                if key not in protected:
                    self.remove([key])
                    ghosts.insert(0, key)
                    return key
        raise AssertionError("the caller has made sure that one may go")


class S3FIFOOracle(Oracle):
    """Yang et al. 2023, algorithm 1."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.tenth = capacity // 10 or 1
        self.small: list[bytes] = []
        self.main: list[bytes] = []
        self.ghost: list[bytes] = []
        self.freq: dict[bytes, int] = {}

    def resident(self) -> list[bytes]:
        return self.small[::-1] + self.main[::-1]

    def insert(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self.ghost:
                self.ghost.remove(key)
                self.main.insert(0, key)
            else:
                self.small.insert(0, key)
            self.freq[key] = 0
            self.counted.add(key)

    def use(self, key: bytes) -> None:
        self.freq[key] = min(self.freq[key] + 1, 3)

    def remove(self, keys: Sequence[bytes]) -> None:
        self.small = [key for key in self.small if key not in keys]
        self.main = [key for key in self.main if key not in keys]
        self.counted -= set(keys)

    def give_up_for(self, newcomers: Sequence[bytes], room: int, protected: Collection[bytes]) -> Given | None:
        if self.too_few(len(newcomers) - room, protected):
            return None
        arrived = 0
        ghost = list(self.ghost)
        victims = [self.evict(0, protected) for _ in range(-room)]
        for free, key in zip(range(room, room - len(newcomers), -1), reversed(newcomers), strict=True):
            if free <= 0:
                victims.append(self.evict(arrived, protected))
            if key not in ghost:
                arrived += 1
        return len(newcomers), victims

    def evict(self, arrived: int, protected: Collection[bytes]) -> bytes:
        """evict(), with so many keys in the small queue besides."""
        while True:
            small = [key for key in self.small if key not in protected]
            main = [key for key in self.main if key not in protected]
            if small and (len(self.small) + arrived >= self.tenth or not main):
                tail = small[-1]
                self.small.remove(tail)
                if self.freq[tail] <= 1:
                    self.ghost = [tail, *self.ghost][: self.capacity - self.tenth]
                    break
                self.main.insert(0, tail)
                self.freq[tail] = 0
            else:
                tail = main[-1]
                self.main.remove(tail)
                if self.freq[tail] == 0:
                    break
                self.main.insert(0, tail)
                self.freq[tail] -= 1
        self.counted.discard(tail)
        return tail


PAIRS: dict[str, tuple[Callable[[int], Policy], Callable[[int], Oracle]]] = {
    "lru": (LRU, LRUOracle),
    "arc": (ARC, ARCOracle),
    "s3fifo": (S3FIFO, S3FIFOOracle),
}


class Step(NamedTuple):
    """Something that happens to a cache; `most`: keys to give up, of those that are not `protected`."""

    action: str
    keys: tuple[bytes, ...]
    protected: frozenset[bytes]
    most: int


ACTIONS = ("request", "request", "store", "insert", "load", "touch", "remove", "evict", "ask")


class SideBySide:
    """A policy and its oracle in the same cache. Every step compares what they give up and what they hold."""

    def __init__(self, name: str, capacity: int) -> None:
        make_policy, make_oracle = PAIRS[name]
        self.capacity = capacity
        self.policy = make_policy(capacity)
        self.oracle = make_oracle(capacity)

    def take(self, step: Step) -> None:
        getattr(self, step.action)(step)
        self.compare()

    def compare(self) -> None:
        """The same keys in the same order, and in the same order as they would go from now on."""
        assert list(self.policy) == self.oracle.resident()
        assert len(self.policy) == len(self.oracle.resident()) <= self.capacity
        assert self.policy.victims(len(self.policy), lambda _: False) == self.would_go(len(self.policy), frozenset())

    def would_go(self, count: int, protected: frozenset[bytes]) -> list[bytes] | None:
        return deepcopy(self.oracle).give_up(count, protected)

    def state(self) -> object:
        return repr(self.policy), list(self.policy)

    def request(self, step: Step) -> None:
        """All of a request's life: what is there is loaded, what is not is stored, and it ends."""
        self.load(step)
        self.store(step)
        self.touch(step)

    def store(self, step: Step) -> None:
        newcomers = self.missing(step)
        room = self.capacity - len(self.policy)
        protected = step.protected | set(step.keys)
        before = self.state()
        made = self.policy.make_room(newcomers, room, protected.__contains__)
        assert self.policy.make_room(newcomers, room, protected.__contains__) == made
        assert self.state() == before
        given = self.oracle.give_up_for(newcomers, room, protected)
        assert made == given
        if made is not None:
            self.policy.remove(made.victims, evicted=True)
            self.policy.insert(newcomers[: made.admitted])
            self.oracle.insert(newcomers[: made.admitted])

    def insert(self, step: Step) -> None:
        newcomers = self.missing(step)[: self.capacity - len(self.policy)]
        self.policy.insert(newcomers)
        self.oracle.insert(newcomers)

    def load(self, step: Step) -> None:
        found = self.present(step)
        self.policy.load(found)
        self.oracle.load(found)

    def touch(self, step: Step) -> None:
        self.policy.touch(step.keys)
        self.oracle.touch(step.keys)

    def remove(self, step: Step) -> None:
        found = self.present(step)
        self.policy.remove(found, evicted=False)
        self.oracle.remove(found)

    def evict(self, step: Step) -> None:
        self.ask(step)
        before = self.state()
        given = self.policy.evict(step.most, step.protected.__contains__)
        assert given == self.oracle.give_up(step.most, step.protected)
        assert given is not None or self.state() == before

    def ask(self, step: Step) -> None:
        """Asking, once and twice, changes nothing."""
        before = self.state()
        for _ in range(2):
            victims = self.policy.victims(step.most, step.protected.__contains__)
            assert victims == self.would_go(step.most, step.protected)
        assert self.state() == before

    def missing(self, step: Step) -> list[bytes]:
        return [key for key in step.keys if key not in self.oracle.resident()]

    def present(self, step: Step) -> list[bytes]:
        return [key for key in step.keys if key in self.oracle.resident()]
