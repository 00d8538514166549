"""A program that is interrupted by real signals at random moments: `python signal_program.py SEED SECONDS POLICY`.

A timer sends SIGALRM after a few random microseconds; its handler raises KeyboardInterrupt in the main thread, wherever
that is in the library. Every key that is then a hit is loaded and its bytes are compared. Prints a line of JSON.
"""

from __future__ import annotations

import gc
import json
import random
import signal
import sys
import time
import warnings
from types import FrameType
from typing import Any

from interrupts import SIMULATOR
from worlds import CAPACITY, SECONDS, SOURCES, CacheWorld, keys, numbers_of

from kvoffload import NO_WAIT, CapacityError, KVOffloadError, MissingKeyError

TARGETS = list(range(40, 40 + CAPACITY))


class Interrupter:
    """Raises KeyboardInterrupt in the main thread once, some random time after `arm`, unless disarmed before."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._armed = False
        self.delivered = 0
        signal.signal(signal.SIGALRM, self._interrupt)

    def _interrupt(self, _: int, frame: FrameType | None) -> None:
        if self._armed and _in_simulator(frame):  # a driver call is not interrupted: after it
            signal.setitimer(signal.ITIMER_REAL, 20e-6)
        elif self._armed:
            self._armed = False
            self.delivered += 1
            raise KeyboardInterrupt

    def arm(self, longest: float) -> None:
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, max(1e-6, self._rng.random() * longest))

    def disarm(self) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)


def _in_simulator(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(SIMULATOR):
            return True
        frame = frame.f_back
    return False


def one_request(world: CacheWorld, rng: random.Random) -> None:
    """What a server does for a request, each step of which may be interrupted."""
    numbers = rng.sample(range(SOURCES), rng.randint(1, CAPACITY - 1))
    cache = world.cache
    step = rng.randrange(8)
    if step == 0:
        cache.remove(keys(numbers))
    elif step == 1:
        with cache.reserve(keys(numbers)) as reservation:
            world.write(reservation)
    elif step == 2:
        reservation = cache.reserve(keys(numbers))
        job = world.engine.store(numbers_of(reservation.keys), reservation.slots(), after=NO_WAIT)
        reservation.commit(job)
    else:
        found = cache.lookup(keys(numbers))
        cache.load(keys(numbers[:found]), TARGETS[:found], after=NO_WAIT)
        cache.store(keys(numbers), numbers, after=NO_WAIT)
        cache.touch(keys(numbers))
    if rng.random() < 0.3:
        world.engine.drain(SECONDS)


def interrupted(world: CacheWorld, rng: random.Random, interrupter: Interrupter, longest: float) -> None:
    """A request with a signal at some moment of it or, as often, after it."""
    try:
        try:
            interrupter.arm(longest)
            one_request(world, rng)
        finally:
            interrupter.disarm()  # at the entry of which the signal may arrive, too
    except (KeyboardInterrupt, CapacityError, MissingKeyError):
        pass


def main(seed: int, seconds: float, policy: str) -> dict[str, Any]:
    """Interrupt for some seconds of CPU time; what was found."""
    rng = random.Random(f"{seed} {policy}")
    interrupter = Interrupter(rng)
    found: list[str] = []
    requests = 0
    while time.process_time() < seconds and not found:
        world = CacheWorld(policy)
        for _ in range(20):
            try:
                interrupted(world, rng, interrupter, 0.004)
            except (KVOffloadError, TimeoutError, AssertionError, KeyError) as error:
                found.append(f"broken: {type(error).__name__}: {error}")
            requests += 1
        interrupter.disarm()
        gc.collect()
        found += world.problems(creating=True)
    return {"seed": seed, "policy": policy, "requests": requests, "signals": interrupter.delivered, "problems": found}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])))
