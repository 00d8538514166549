"""A program that is interrupted by real signals at random moments: `python signal_program.py SEED SECONDS POLICY`.

A timer sends SIGALRM after some random microseconds; its handler raises KeyboardInterrupt in the main thread, wherever
that is in the library (`haunting.Interrupts`). Every key that is then a hit is loaded and its bytes are compared.
Prints a line of JSON.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
import warnings
from collections import Counter
from functools import partial
from typing import Any

from haunting import Interrupts
from worlds import CAPACITY, SECONDS, SOURCES, CacheWorld, keys, numbers_of

from kvoffload import NO_WAIT, CapacityError, KVOffloadError, MissingKeyError

TARGETS = list(range(40, 40 + CAPACITY))


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


def main(seed: int, seconds: float, policy: str) -> dict[str, Any]:
    """Interrupt for some seconds of CPU time; what was found."""
    rng = random.Random(f"{seed} {policy}")
    counts, found, requests = Counter[str](), list[str](), 0
    interrupts = Interrupts(2 * seed, counts)  # an even number: in every Python
    while time.process_time() < seconds and not found:
        world = CacheWorld(policy)
        for _ in range(20):
            try:
                interrupts.during(partial(one_request, world, rng))
            except (CapacityError, MissingKeyError):
                pass
            except (KVOffloadError, TimeoutError, AssertionError, KeyError) as error:
                found.append(f"broken: {type(error).__name__}: {error}")
            requests += 1
        gc.collect()
        found += world.problems(creating=True)
    return {"seed": seed, "policy": policy, "requests": requests, "signals": counts["interrupts"], "problems": found}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])))
