"""Four engines in processes of their own, one pool, random calls, and a model of what each may find.

`python fuzz_pool.py JSON`, for which `exhaust_pool.py` has the options.

A round has one pool. This process decides what each engine does next. In ordered rounds it waits for each answer, so
that a model says what the answer must be (`pool_judges.Exact`, or with other policies than "lru" `Ledger`); in the
others all four work at the same time, and what always holds is checked. Engines leave and are killed, owners are closed
and killed, others take their places. At the end nothing may be held any more, and every entry can be reserved.

Where the model is a `Ledger`, each engine changes its weights at random. The same key with other weights is another
number, with other bytes (see `pool_processes.py`).

Prints a line of JSON: counts, and what was wrong.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

from exhausting import counting_what_is_left
from pool_judges import Exact, Ledger
from pool_processes import KEYS, POLICIES, EngineProcess, OwnerProcess, Worker
from pooling import SECONDS, eventually

HUNG_SECONDS = 60.0
CAPACITY, UNIVERSE, LONGEST = 14, 24, 6
SESSIONS = ("a", "b", None)
BELOW = ("tier", "disk")  # policies with tiers
ROUNDS = (("lru", False), *((policy, together) for policy in POLICIES for together in (False, True)))  # by the seed

Command = tuple[str, tuple[Any, ...], dict[str, Any]]
Step = Generator[Command | None, Any, None]  # yields commands, or None to wait for a new engine; is sent the answers


def command(name: str, *arguments: Any, **options: Any) -> Command:
    return name, arguments, options


@dataclass
class Engine:
    """What this process knows of an engine.

    Attributes:
        step: what it is doing.
        sent: when it was told its latest command.
        reserved, leased: handles that are open, and their keys, with the versions of those reserved.
        requests, outdated: open ones; of these, those that were opened with other weights.
        first: key of its weights.
        gated: no store ends before `finish`.
        stores, loads, dropped: handles of what ends then.
    """

    number: int
    worker: Worker
    step: Step | None = None
    sent: int = 0
    reserved: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    leased: dict[int, list[int]] = field(default_factory=dict)
    requests: list[int] = field(default_factory=list)
    outdated: list[int] = field(default_factory=list)
    first: int = 0
    gated: bool = False
    stores: list[int] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    dropped: list[tuple[str, int]] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        """What becomes garbage is held until transfers that are in flight have ended, which is at `finish`."""
        return self.gated or bool(self.loads)

    def readable(self) -> list[list[int]]:
        """What leases hold of its weights."""
        return [numbers for numbers in self.leased.values() if numbers and numbers[0] // KEYS * KEYS == self.first]

    def forget(self) -> None:
        """Another process has its number."""
        self.gated, self.first = False, 0
        for each in (self.reserved, self.leased, self.requests, self.outdated, self.stores, self.loads, self.dropped):
            each.clear()


class Round:
    """A pool, its processes, and the judge.

    Args:
        together: all engines work at the same time.
    """

    def __init__(self, seed: int, policy: str, *, together: bool, engines: int = 4) -> None:
        self.rng, self.policy, self.together = random.Random(f"{seed} {policy} {together}"), policy, together
        self.exact = policy == "lru" and not together
        self.judge: Exact | Ledger = Exact(CAPACITY) if self.exact else Ledger(CAPACITY, same=policy in BELOW)
        self.counts = self.judge.counts
        self.handles, self.longest = 0, 0.0
        self.steps_of_weights = 3  # the highest number of weights so far
        self.since: dict[int, float] = {}  # when engines were told their latest commands
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz-pool-"))
        self.path = str(self.folder / "pool")
        self.workers: list[Worker] = []  # that may have to be killed
        self.owner = self.new_owner()
        self.engines = [Engine(number, self.new_engine(number)) for number in range(1, engines + 1)]
        for each in self.engines:
            each.worker.answer(HUNG_SECONDS)

    def new_owner(self) -> Worker:
        grace = 1.0 if self.together else 0.2
        worker = Worker(0, OwnerProcess, self.path, CAPACITY, self.policy, grace)
        self.workers.append(worker)
        worker.answer(HUNG_SECONDS)
        self.grace_until = time.monotonic() + grace
        return worker

    def new_engine(self, number: int) -> Worker:
        make = partial(EngineProcess, settles=not self.together)
        worker = Worker(number, make, self.path, self.rng.randrange(1 << 30))
        self.workers.append(worker)
        return worker

    def close(self) -> None:
        for each in self.workers:
            if not each.ended:
                each.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    # one after another, or together -------------------------------------------------------------------------------

    def run(self, steps: int, until: float) -> None:
        (self.run_together if self.together else self.run_ordered)(steps, until)
        self.end()

    def run_ordered(self, steps: int, until: float) -> None:
        for _ in range(steps):
            if time.monotonic() > until:
                return
            happens = self.rng.choices((self.do_step, self.exchange_engine, self.exchange_owner), (80, 1, 1))[0]
            happens()

    def do_step(self) -> None:
        each = self.rng.choice(self.engines)
        before = self.judge.uncertain
        self.do(each, self.choose(each))
        self.look(patient=before)

    def do(self, engine: Engine, step: Step) -> None:
        engine.step = step
        self.go_on(engine, None)
        while engine.step is not None:
            self.go_on(engine, self.answer_of(engine))

    def answer_of(self, engine: Engine) -> Any:
        answer = engine.worker.answer(HUNG_SECONDS)
        self.judge.tick()
        self.longest = max(self.longest, time.monotonic() - self.since[engine.number])
        return answer

    def go_on(self, engine: Engine, answer: Any) -> None:
        """The engine has answered: tell it what is next."""
        assert engine.step is not None
        try:
            told = engine.step.send(answer)
        except StopIteration:
            engine.step = None
            return
        engine.sent, self.since[engine.number] = self.judge.tick(), time.monotonic()
        if told is not None:
            name, arguments, options = told
            engine.worker.send(name, *arguments, **options)

    def look(self, *, patient: bool) -> None:
        """Compare what an engine sees with the model; at last, where others have to notice something first."""
        each, end = self.rng.choice(self.engines), time.monotonic() + SECONDS
        while True:
            try:
                self.do(each, self.see(each))
                return
            except AssertionError:
                if not patient or time.monotonic() > end:
                    raise
                each.step = None
                time.sleep(0.002)

    def run_together(self, steps: int, until: float) -> None:
        left, owner_comes = steps, -1  # when fewer steps are left; -1: there is one
        while left or any(each.step is not None for each in self.engines):
            left = left if time.monotonic() < until else 0
            for each in self.engines:
                if each.step is None and left:
                    left -= 1
                    each.step = self.choose(each)
                    self.go_on(each, None)
            working = {each.worker.connection: each for each in self.engines if each.step is not None}
            awaited = HUNG_SECONDS if owner_comes < 0 else 0.2  # engines that start wait for an owner
            answered = connection.wait(list(working), awaited) if working else []
            silent = [str(each.worker) for each in working.values()] if not answered else []
            assert not silent or owner_comes >= 0, f"{silent} hang"
            for each in [each for connected, each in working.items() if connected in answered]:
                self.go_on(each, self.answer_of(each))
            if owner_comes >= 0 and (left <= owner_comes or silent):
                self.owner, owner_comes = self.new_owner(), -1
                self.counts["owners"] += 1
            elif left and self.rng.random() < 0.01:
                self.kill_working(self.rng.choice(self.engines))
            elif left and owner_comes < 0 and self.rng.random() < 0.005:
                self.owner.kill()
                self.judge.lose_owner()
                owner_comes = max(0, left - self.rng.choice((0, 0, 5, 20)))
        if owner_comes >= 0:
            self.owner = self.new_owner()

    def kill_working(self, engine: Engine) -> None:
        """In the middle of a command, mostly."""
        if engine.step is not None:
            engine.step.close()
        engine.worker.kill()
        self.counts["engines killed"] += 1
        engine.step = self.start(engine)
        self.go_on(engine, None)

    # processes come and go, in ordered rounds ---------------------------------------------------------------------

    def start(self, engine: Engine) -> Step:
        """Another engine in the place of one that has ended."""
        self.judge.leave(engine.number)
        engine.forget()
        engine.worker = self.new_engine(engine.number)
        yield None

    def exchange_engine(self) -> None:
        each = self.rng.choice(self.engines)
        if self.rng.random() < 0.5:
            self.do(each, self.leave(each))
        elif self.exact or self.rng.random() < 0.3:
            each.worker.kill()
            self.counts["engines killed"] += 1
            self.owner_sees(len(self.engines) - 1)
            self.do(each, self.start(each))
        else:
            self.kill_haunted(each)
        self.look(patient=True)

    def kill_haunted(self, engine: Engine) -> None:
        """Others go on while its reserved entries are still being written. (`Exact` knows of no quarantine.)"""
        haunted = self.folder / "haunted"
        haunted.touch()
        self.do(engine, self.reserve(engine))
        self.do(engine, self.one(command("haunt", self.rng.choice(list(engine.reserved)), str(haunted))))
        engine.worker.process.kill()
        self.owner_sees(len(self.engines) - 1)
        self.judge.leave(engine.number)
        others = [other for other in self.engines if other is not engine]
        for other in self.rng.choices(others, k=20):
            self.do(other, self.choose(other))
        haunted.unlink()
        engine.worker.end()
        self.counts["engines killed"] += 1
        self.do(engine, self.start(engine))

    def leave(self, engine: Engine) -> Step:
        """It closes all, whatever it has, and another one comes."""
        yield from self.finish(engine)
        yield command("leave")
        engine.worker.end()
        if not self.together:
            self.owner_sees(len(self.engines) - 1)
        self.counts["engines left"] += 1
        yield from self.start(engine)

    def owner_sees(self, members: int) -> None:
        eventually(lambda: self.statistics()["members"] == members, f"the owner has {members} members")

    def statistics(self) -> dict[str, int]:
        self.owner.send("statistics")
        found: dict[str, int] = self.owner.answer(HUNG_SECONDS)[0]
        return found

    def exchange_owner(self) -> None:
        """An owner ends, all go on without one for a while, and another one comes."""
        for each in self.engines:
            if self.rng.random() < 0.4:
                self.do(each, self.release_all(each))
            for step in self.rng.sample((self.reserve, self.lease, self.store), 3):
                if self.rng.random() < 0.3 and not self.judge.uncertain:
                    self.do(each, step(each))
        if self.rng.random() < 0.3:
            self.owner.send("leave")
            self.owner.answer(HUNG_SECONDS)
            self.owner.end()
        else:
            self.owner.kill()
        self.judge.lose_owner()
        self.go_on_without_owner()
        dead = [each for each in self.engines if self.rng.random() < 0.1][:1]
        for each in dead:
            each.worker.kill()
            self.counts["engines killed"] += 1
            self.judge.leave(each.number)
        self.owner = self.new_owner()
        self.judge.have_owner()
        for each in self.engines:
            if each not in dead:
                self.do(each, self.one(command("joined")))
                self.judge.join(each.number, sent=each.sent)
        for each in dead:
            self.do(each, self.start(each))
        order = self.rng.sample(range(UNIVERSE), UNIVERSE)
        self.do(self.engines[0], self.touch(self.engines[0], order))
        self.look(patient=True)
        for each in self.engines:  # what it reads still, it reads once more
            for numbers in each.readable()[:1] if not each.loads else ():
                self.do(each, self.fetch(each, numbers))
        self.counts["owners"] += 1

    def go_on_without_owner(self) -> None:
        for each in self.engines:
            self.do(each, self.one(command("lost")))
        for _ in range(self.rng.choice((0, 0, 4))):
            each = self.rng.choice(self.engines)
            self.do(each, self.choose(each))
        for each in self.engines:
            self.do(each, self.read_again(each))

    def read_again(self, engine: Engine) -> Step:
        """What a lease holds it can load and lease: in any order, and also a part of it, but nothing else with that."""
        for numbers in [each for each in engine.readable() if self.rng.random() < 0.5]:
            some = self.rng.sample(numbers, self.rng.randint(1, len(numbers)))
            if self.rng.random() < 0.1 and (other := engine.first + (some[0] + 1) % KEYS % UNIVERSE) not in some:
                some.append(other)
            if self.rng.random() < 0.3:
                yield from self.lease(engine, some)
            elif not engine.loads:
                yield from self.load(engine, some)

    def one(self, told: Command) -> Step:
        yield told

    # the end ------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Nothing is held, every entry can be had, and nothing is left."""
        for each in self.engines:
            self.do(each, self.one(command("joined")))
            self.do(each, self.release_all(each))
            self.do(each, self.one(command("check")))

        def idle() -> bool:
            found = self.statistics()
            return (found["pending"], found["pinned"]) == (0, 0)

        eventually(idle, "nothing is held")
        each, most = self.engines[0], {"quota": 9, "disk": 11}.get(self.policy, CAPACITY)
        numbers = list(range(each.first + 1000, each.first + 1000 + CAPACITY))

        def all_free() -> bool:
            for told in (command("remove", None), command("reserve", 0, numbers, numbers), command("abort", 0)):
                each.worker.send(*told[:1], *told[1])
                answer = each.worker.answer(HUNG_SECONDS)
                found = len(answer) if told[0] == "reserve" else -1
                if found >= 0:
                    free.append(found)
            return free[-1] == most

        free: list[int] = []
        eventually(all_free, "all entries can be reserved")
        for each in self.engines:
            self.do(each, self.one(command("leave")))
            each.worker.end()
        self.owner_sees(0)
        time.sleep(max(0.0, self.grace_until - time.monotonic()))  # until then it leaves the socket to the next one
        self.owner.send("leave")
        self.owner.answer(HUNG_SECONDS)
        self.owner.end()
        assert {each.name.partition("-")[0] for each in self.folder.iterdir()} <= {"tier"}, "files are left"
        self.counts["rounds"] += 1

    # steps of an engine -------------------------------------------------------------------------------------------

    def choose(self, engine: Engine) -> Step:
        if engine.waits and self.rng.random() < 0.2:
            return self.finish(engine)
        writing: dict[Callable[[Engine], Step], int] = {self.store: 24, self.reserve: 6}
        if self.judge.uncertain:
            writing = {}
        rest: dict[Callable[[Engine], Step], int] = {
            self.load: 14, self.fetch: 16, self.settle: 8, self.lease: 6, self.release: 6, self.see: 4, self.finish: 3,
            self.remove: 5, self.open_request: 6, self.end_request: 6, self.touch: 3,
        }  # fmt: skip
        if engine.loads:  # loads end one after another
            del rest[self.load], rest[self.fetch]
        if not self.exact:
            rest |= {self.hint: 2, self.abandon: 4, self.change: 12}
        if self.together:
            rest |= {self.leave: 1}
            if self.policy in BELOW:  # whose keys may come back until then: versions would have to be told apart
                del rest[self.remove]
        chances = writing | rest
        self.counts["steps"] += 1
        return self.rng.choices(list(chances), list(chances.values()))[0](engine)

    def some(self, engine: Engine) -> list[int]:
        """Neighbours, as requests with a common prefix have them."""
        start = self.rng.randrange(UNIVERSE)
        return [engine.first + (start + each) % UNIVERSE for each in range(self.rng.randint(1, LONGEST))]

    def change(self, engine: Engine) -> Step:
        """To other weights: some come back, some never do. What it has opened before stays open."""
        for _ in range(self.rng.choice((1, 1, 2, 6))):
            steps = self.rng.choice((0, 1, 2, self.steps_of_weights + 1))
            self.steps_of_weights = max(steps, self.steps_of_weights)
            if engine.first != steps * KEYS:
                self.counts["changes"] += 1
                engine.outdated = list(engine.requests)
            engine.first = steps * KEYS
            yield command("use_weights", engine.first)

    def handle(self, engine: Engine, what: str) -> tuple[int, str, int]:
        self.handles += 1
        return engine.number, what, self.handles

    def request_of(self, engine: Engine) -> int | None:
        return self.rng.choice(engine.requests) if engine.requests and self.rng.random() < 0.6 else None

    def store(self, engine: Engine) -> Step:
        numbers, request, keep = self.some(engine), self.request_of(engine), self.rng.random() < 0.3
        versions = list(map(self.judge.version, numbers))
        then_load = self.rng.random() < 0.25 and (engine.gated or not engine.loads)  # else it would be waited for
        gated = not self.together and not engine.gated and not then_load and self.rng.random() < 0.2
        wait = not (gated or engine.gated or (not self.exact and self.rng.random() < 0.3))
        self.judge.begun(numbers, versions)
        answer = yield command(
            "store", numbers, versions, keep=keep, request=request, gated=gated, wait=wait, then_load=then_load
        )
        engine.gated |= gated and bool(answer["accepted"])
        handle = self.handle(engine, "store")
        opened = None if request is None else (engine.number, "request", request)
        assert not answer["accepted"] or request not in engine.outdated, f"{handle}: stores with other weights"
        self.judge.reserve(handle, numbers, versions, answer["accepted"], sent=engine.sent, request=opened)
        if keep and opened is None:
            self.judge.touch(numbers)
        elif keep and opened is not None:
            self.judge.end_request(opened)
            engine.requests.remove(opened[2])
        if answer["found"] == "later":
            load = self.handle(engine, "load")
            self.judge.lease(load, numbers, [], sent=engine.sent, pending=True)
            engine.loads.append(load[2])
        elif then_load and answer["found"] != "none":
            self.judge.load(engine.number, numbers, answer["found"], "loaded behind", sent=engine.sent, pending=True)
        if wait:
            self.judge.commit(handle)
        else:
            engine.stores.append(handle[2])

    def finish(self, engine: Engine) -> Step:
        found = yield command("finish")
        engine.gated = False
        for number in engine.stores:
            self.judge.commit((engine.number, "store", number))
        for number, versions in zip(engine.loads, found, strict=True):
            self.judge.release((engine.number, "load", number), versions)
        for what, number in engine.dropped:
            self.judge_drop(engine, what, number)
        for each in (engine.stores, engine.loads, engine.dropped):
            each.clear()

    def judge_drop(self, engine: Engine, what: str, number: int) -> None:
        if what == "reservation":
            self.judge.abort((engine.number, what, number))
        else:
            self.judge.release((engine.number, what, number), None)

    def load(self, engine: Engine, given: list[int] | None = None) -> Step:
        numbers, request = given or self.some(engine), self.request_of(engine)
        found = yield command("look_up", numbers)
        self.judge.look_up(numbers, found, sent=engine.sent)
        if not given and self.rng.random() < 0.9:
            numbers = numbers[:found]
        versions = yield command("load", numbers, request=request)
        opened = None if request is None else (engine.number, "request", request)
        self.judge.load(engine.number, numbers, versions, "loaded", sent=engine.sent, request=opened)

    def fetch(self, engine: Engine, numbers: list[int] | None = None) -> Step:
        request, numbers, again = self.request_of(engine), numbers or self.some(engine), bool(numbers)
        if not self.together and not again and self.rng.random() < 0.2:
            found = yield command("begin_fetch", numbers)
            self.judge.look_up(numbers, found, sent=engine.sent)
            load = self.handle(engine, "load")
            if found:
                self.judge.lease(load, numbers[:found], [], sent=engine.sent, pending=True)
                engine.loads.append(load[2])
            return
        versions = yield command("fetch", numbers, request=request)
        opened = None if request is None else (engine.number, "request", request)
        self.judge.load(engine.number, numbers, versions, "fetched", sent=engine.sent, request=opened, whole=False)

    def abandon(self, engine: Engine) -> Step:
        yield command("abandon", self.some(engine))

    def reserve(self, engine: Engine) -> Step:
        numbers = self.some(engine)
        versions = list(map(self.judge.version, numbers))
        handle = self.handle(engine, "reservation")
        accepted = yield command("reserve", handle[2], numbers, versions)
        self.judge.reserve(handle, numbers, versions, accepted, sent=engine.sent, request=None)
        version_of = dict(zip(numbers, versions, strict=True))
        engine.reserved[handle[2]] = accepted, [version_of[number] for number in accepted]

    def settle(self, engine: Engine, *, abort: bool = False) -> Step:
        """Commit, abort or drop a reservation."""
        if not engine.reserved:
            return
        number = self.rng.choice(list(engine.reserved))
        written = engine.reserved.pop(number)
        kind = 0.9 if abort else self.rng.random()
        if kind < 0.6:
            copied = kind < 0.3 and not engine.gated
            self.judge.begun(*written)
            yield command("commit", number, copy=written if copied else None)
            self.judge.commit((engine.number, "reservation", number))
        else:
            dropped = kind < 0.8
            yield command("drop" if dropped else "abort", number)
            if dropped and engine.waits:
                engine.dropped.append(("reservation", number))
            else:
                self.judge.abort((engine.number, "reservation", number))

    def lease(self, engine: Engine, given: list[int] | None = None) -> Step:
        numbers = given or self.some(engine)
        if not given and self.rng.random() < 0.8:
            found = yield command("look_up", numbers)
            self.judge.look_up(numbers, found, sent=engine.sent)
            numbers = numbers[:found]
        handle = self.handle(engine, "lease")
        versions = yield command("lease", handle[2], numbers)
        self.judge.lease(handle, numbers, versions, sent=engine.sent)
        if versions is not None:
            engine.leased[handle[2]] = numbers

    def release(self, engine: Engine, *, drop: bool | None = None) -> Step:
        """What was leased has stayed as it was, whatever has been removed and stored since."""
        if not engine.leased:
            return
        number = self.rng.choice(list(engine.leased))
        numbers = engine.leased.pop(number)
        dropped = self.rng.random() < 0.2 if drop is None else drop
        versions = None if dropped else (yield command("release", number, numbers))
        if dropped:
            yield command("drop", number)
        if dropped and engine.waits:
            engine.dropped.append(("lease", number))
            self.judge.drop((engine.number, "lease", number))
        else:
            self.judge.release((engine.number, "lease", number), versions)

    def release_all(self, engine: Engine) -> Step:
        while engine.reserved:
            yield from self.settle(engine, abort=True)
        while engine.leased:
            yield from self.release(engine, drop=False)
        while engine.requests:
            yield from self.end_request(engine)
        yield from self.finish(engine)

    def open_request(self, engine: Engine) -> Step:
        if len(engine.requests) < 3:
            handle = self.handle(engine, "request")
            yield command("open_request", handle[2], None if self.exact else self.rng.choice(SESSIONS))
            self.judge.open_request(handle)
            engine.requests.append(handle[2])

    def end_request(self, engine: Engine) -> Step:
        if engine.requests:
            request = engine.requests.pop(self.rng.randrange(len(engine.requests)))
            yield command("end_request", request)
            self.judge.end_request((engine.number, "request", request))

    def touch(self, engine: Engine, numbers: list[int] | None = None) -> Step:
        numbers = self.some(engine) if numbers is None else numbers
        yield command("touch", numbers)
        self.judge.touch(numbers)

    def hint(self, engine: Engine) -> Step:
        del engine
        yield command("hint", self.rng.choice(("retain", "release", "demote", "prefetch")), "a")

    def remove(self, engine: Engine) -> Step:
        """Some, or all."""
        clear = self.rng.random() < 0.1
        every = [step * KEYS + number for step in range(self.steps_of_weights + 1) for number in range(UNIVERSE)]
        numbers = every if clear else self.some(engine)[:2]
        answer = yield command("remove", None if clear else numbers)
        self.judge.remove(engine.number, numbers, answer["count"], heard=answer["heard"], sent=engine.sent)

    def see(self, engine: Engine) -> Step:
        answer = yield command("look", UNIVERSE)
        self.judge.look(answer["statuses"], answer["statistics"], sent=engine.sent)


def run(rounds: int, steps: int, seed: int, seconds: float) -> tuple[Counter[str], list[str]]:
    """Counts, and what was wrong."""
    counts, wrong, until, longest = Counter[str](), list[str](), time.monotonic() + seconds, 0.0
    with counting_what_is_left(counts):
        for own_seed in range(seed, seed + rounds):
            policy, together = ROUNDS[own_seed % len(ROUNDS)]
            if time.monotonic() > until or len(wrong) >= 5:
                break
            made = Round(own_seed, policy, together=together)
            try:
                made.run(steps, until)
            except AssertionError:
                kind = "together" if together else "ordered"
                wrong.append(f"seed {own_seed} (policy {policy}, {kind}): {traceback.format_exc()[-1500:]}")
            finally:
                made.close()
            counts.update(made.counts)
            longest = max(longest, made.longest)
    counts["longest call ms"] = int(1000 * longest)
    return counts, wrong


if __name__ == "__main__":
    logging.getLogger("kvoffload").setLevel(logging.CRITICAL)
    totals, problems = run(**json.loads(sys.argv[1]))
    print(json.dumps({"counts": totals, "wrong": problems}))
