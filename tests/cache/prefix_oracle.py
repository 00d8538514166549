"""The prefix policy once more: a record a key, no runs, no queues, everything computed anew when it is asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from policy_oracles import Given, Oracle


@dataclass
class Settings:
    """The policy's constants; tests make them small, so that all of it happens within a few steps."""

    edges: tuple[int, ...] = tuple([0] + [round(128 * 2 ** (step / 3)) for step in range(99)])
    remembered: int = 24_576
    round: int = 8_192
    chance: float = 64.0
    in_time: bool = False


@dataclass
class Record:
    """What is known of a key; `call` and `place` say where in which call it was named last."""

    uses: int
    at_end: bool
    time: int
    counted: bool
    call: int
    place: int
    stays: bool

    @property
    def kind(self) -> int:
        return 10 if self.uses == 6 else 2 * self.uses - (2 if self.at_end else 1)

    @property
    def run(self) -> tuple[int, int, bool, bool]:
        return self.call, self.uses, self.at_end and self.uses < 6, self.stays


@dataclass
class Observation:
    kind: int
    age: int
    reused: bool
    weight: float = 1.0


@dataclass
class PrefixOracle(Oracle):
    capacity: int
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        self.here: dict[bytes, Record] = {}
        self.gone: dict[bytes, tuple[int, Record]] = {}  # with the generation that it was remembered in
        self.observations: list[Observation] = []
        self.learned = False
        self.used_together: dict[int, list[tuple[int, int]]] = {kind: [] for kind in range(11)}  # blocks, and when
        self.rounds = 0
        self.trust = 1.0  # in what was learned; 0: as LRU does
        self.room = self.capacity
        self.recent: dict[object, int] = {}  # by call and kind, the oldest first: how many of these keys LRU would hold
        self.hits = self.recent_hits = self.uses = 0.0  # of this cache, of LRU, and all; those of earlier rounds fading
        self.worths = [[(kind // 2 + 1) / (1 + edge) for edge in self.settings.edges] for kind in range(11)]
        self.now = self.calls = self.generation = 0
        self.due = self.round

    @property
    def round(self) -> int:
        return max(self.settings.round, self.capacity)

    def resident(self) -> list[bytes]:
        return self.order(set())

    def insert(self, keys: Sequence[bytes]) -> None:
        self.name(keys, counted=True, ends=True)

    def load(self, keys: Sequence[bytes]) -> None:
        self.name(keys, counted=True, ends=False)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.name(keys, counted=False, ends=True)

    def use(self, key: bytes) -> None:
        raise NotImplementedError

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.leaves(self.here.pop(key))

    def leaves(self, record: Record) -> bool:
        """The key was used again, or is gone. Returns whether LRU would hold it."""
        held = self.recent.get(record.run, 0)
        if held > 1:
            self.recent[record.run] = held - 1
        else:
            self.recent.pop(record.run, None)
        return held > 0

    def name(self, keys: Sequence[bytes], *, counted: bool, ends: bool) -> None:
        asked = 0
        before = {key: self.here.get(key) or (self.gone[key][1] if key in self.gone else None) for key in keys}
        olds = [(key in self.here, old and old.run) for key, old in before.items()]
        used = 0
        absent: list[tuple[bytes, Record]] = []
        for place, key in enumerate(keys):
            old, resident = before[key], key in self.here
            renews = old is not None and resident and old.counted and not counted
            recent = old is not None and self.leaves(old)
            if not renews:
                asked += 1
                if old is not None:
                    self.observations.append(Observation(old.kind, self.now - old.time, reused=True))
                    self.hits, self.recent_hits = self.hits + resident, self.recent_hits + recent
                    self.uses, used = self.uses + 1, used + 1
                    if olds[place] != (olds[place + 1] if place + 1 < len(olds) else None):
                        self.used_together[old.kind].append((used, self.rounds))
                        used = 0
                        if self.is_behind():
                            self.trust = 0.0
            uses = 1 if old is None else old.uses if renews else min(6, old.uses + 1)
            at_end = ends and place == len(keys) - 1
            record = Record(uses, at_end, self.now, counted, self.calls, place, resident or counted)
            if resident or counted:
                self.gone.pop(key, None)
                self.here[key] = record
            else:
                absent.append((key, record))
            self.recent[record.run] = self.recent.get(record.run, 0) + 1
        self.calls += 1
        if not counted or sum(self.recent.values()) > 2 * self.room:
            while (excess := sum(self.recent.values()) - self.room) > 0:
                oldest = next(iter(self.recent))
                self.recent[oldest] -= min(excess, self.recent[oldest])
                if not self.recent[oldest]:
                    del self.recent[oldest]
        for key, _ in absent:
            self.gone.pop(key, None)
        places = {key: place for place, key in enumerate(keys)}

        def together(item: tuple[bytes, Record]) -> object:
            """Neighbours of one request that were remembered alike."""
            key, record = item
            old = before[key]
            leading = next((p for p in range(places[key], -1, -1) if keys[p] not in dict(absent)), -1)
            return leading, None if old is None else old.run, record.at_end

        for _, part in groupby(absent, key=together):
            self.remember(list(part))
        self.now += asked
        if self.now >= self.due:
            self.due = self.now + self.round
            self.learn()

    def remember(self, items: list[tuple[bytes, Record]]) -> None:
        for key, record in items:
            self.gone[key] = (self.generation, record)
        young = sum(generation == self.generation for generation, _ in self.gone.values())
        if young > max(self.settings.remembered, self.capacity // 16) // 2:
            for key, (generation, record) in list(self.gone.items()):
                if generation < self.generation:
                    del self.gone[key]
                    self.observations.append(Observation(record.kind, self.now - record.time, reused=False))
                    self.leaves(record)
            self.generation += 1

    # worth

    def range_of(self, age: int) -> int:
        return max(index for index, edge in enumerate(self.settings.edges) if edge <= age)

    def is_behind(self) -> bool:
        """Whether LRU would have found more, by more than chance and the leeway."""
        missed = 1 - self.recent_hits / max(1.0, self.uses) if self.capacity >= self.settings.edges[1] else 0.0
        leeway = max(self.settings.chance, (0.0003 + (3 * missed) ** 8) * self.recent_hits)
        return self.hits + leeway < self.recent_hits

    def trust_again(self) -> None:
        """What LRU has found more is forgotten in a thousand rounds, what it has found less in a hundred."""
        self.trust = 0.0 if self.is_behind() else min(1.0, self.trust + (0.2 if self.settings.in_time else 1.0))
        ahead = self.hits - self.recent_hits
        self.recent_hits, self.uses = 0.99 * self.recent_hits, 0.99 * self.uses
        self.hits = self.recent_hits + (0.999 if ahead < 0 else 0.99) * ahead

    def learn(self) -> None:
        self.trust_again()
        edges, records = self.settings.edges, [*self.here.values(), *(record for _, record in self.gone.values())]
        seen = [(each.kind, self.range_of(each.age), each.reused, each.weight) for each in self.observations]
        seen += [(record.kind, self.range_of(self.now - record.time), False, 1.0) for record in records]
        known = sum(sum(weight for _, at, _, weight in seen if at >= index) > 2 + 1e-9 for index in range(len(edges)))
        self.learned |= known > 0

        def counts(kinds: Collection[int], index: int) -> tuple[float, float]:
            """Uses in a range of ages, and blocks that could have been used there."""
            of_kind = [(at, found, weight) for kind, at, found, weight in seen if kind in kinds]
            uses = sum(weight for at, found, weight in of_kind if at == index and found)
            ended = sum(weight for at, found, weight in of_kind if at == index and not found)
            return uses, max(sum(weight for at, _, weight in of_kind if at >= index) - ended / 2, uses)

        lower: dict[int, list[float]] = {}
        for kind in range(11):
            together = [(count, 0.99 ** (self.rounds - when)) for count, when in self.used_together[kind]]
            squares = sum(weight * count * count for count, weight in together)
            borrowed = 8 * (squares / sum(weight * count for count, weight in together) if together else 1)
            chances = []
            for index in range(known):
                every_use, every_block = counts(range(11), index)
                below = every_use / every_block if kind < 2 else lower[9 if kind == 10 else kind - 2][index]
                uses, blocks = counts([kind], index)
                chances.append(below + (uses - below * blocks) / (blocks + borrowed))
            lower[kind] = chances
            for index in range(len(edges)):
                if index < known:
                    self.worths[kind][index] = self.density(chances, index)
                elif index:
                    self.worths[kind][index] = self.worths[kind][index - 1] / 2
        self.rounds += 1
        for each in self.observations:
            each.weight *= 0.98 if self.settings.in_time else 0.8

    def density(self, chances: list[float], start: int) -> float:
        """The best of all ages until which it may be kept."""
        found, edges = [0.0], self.settings.edges
        for stop in range(start + 1, min(len(chances), len(edges) - 1) + 1):
            alive, uses, kept = 1.0, 0.0, 0.0
            for index in range(start, stop):
                uses += alive * chances[index]
                kept += (edges[index + 1] - edges[index]) * alive * (1 - chances[index] / 2)
                alive *= 1 - chances[index]
            found.append(uses / kept)
        return max(found)

    def worth(self, record: Record) -> float:
        return self.worths[record.kind][self.range_of(self.now - record.time)]

    def claim(self, record: Record) -> float:
        if not self.trust:
            return record.time
        place = self.range_of(self.now - record.time)
        return max(worth for low in range(record.kind + 1) for worth in self.worths[low][place:])

    # giving up

    def order(self, protected: Collection[bytes]) -> list[bytes]:
        """Who may go, the first to go first."""

        def rank(key: bytes) -> tuple[float, int, int, int]:
            record = self.here[key]
            return self.claim(record), record.kind, record.call, -record.place

        return sorted((key for key in self.here if key not in protected), key=rank)

    def give_up_for(self, newcomers: Sequence[bytes], room: int, protected: Collection[bytes]) -> Given | None:
        going, victims, admitted = self.order(protected), list[bytes](), len(newcomers)
        while admitted - room > len(victims):
            if (
                admitted
                and going
                and self.trust
                and self.arriving(newcomers, admitted - 1) <= self.trust * self.worth(self.here[going[0]])
            ):
                admitted -= 1
            elif going:
                victims.append(going.pop(0))
            else:
                return None
        self.room = len(self.here) if victims else self.room
        items = [(key, self.here.pop(key)) for key in victims]
        for _, part in groupby(items, key=lambda item: item[1].run):
            self.remember(list(part))
        return admitted, victims

    def arriving(self, newcomers: Sequence[bytes], place: int) -> float:
        uses = min(6, 1 + (self.gone[newcomers[place]][1].uses if newcomers[place] in self.gone else 0))
        record = Record(uses, place == len(newcomers) - 1, self.now, True, 0, 0, True)
        return self.worth(record) if self.learned else float("inf")
