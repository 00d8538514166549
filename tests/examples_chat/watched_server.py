"""The chat server, which says what it holds: `python watched_server.py FILE`, and the server's options.

At each SIGUSR1 it appends a line of JSON to FILE: how many objects of each class of kvoffload and of chat_server live,
and how many entries the dictionaries, queues, arrays in their attributes have. It finds them itself, so that one which
somebody adds is watched, too.
"""

from __future__ import annotations

import array
import gc
import json
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

OURS = ("kvoffload", "chat_server")
LRU_CACHE = type(lru_cache(int))
CONTAINERS = (dict, list, set, deque, bytearray, array.array, np.ndarray)


def attributes(owner: object) -> Iterator[tuple[str, Any]]:
    slots = (getattr(kind, "__slots__", ()) for kind in type(owner).__mro__)
    names = chain.from_iterable((each,) if isinstance(each, str) else each for each in slots)
    yield from ((name, getattr(owner, name, None)) for name in names if name not in ("__dict__", "__weakref__"))
    yield from list(getattr(owner, "__dict__", {}).items())


def entries(value: Any) -> int:
    """How many it has, if it is a container; else 0."""
    if isinstance(value, LRU_CACHE):
        return int(value.cache_info().currsize)
    return len(value) if isinstance(value, CONTAINERS) and getattr(value, "shape", True) else 0


def held() -> dict[str, int]:
    """Live objects by class, and entries of containers by class and attribute, or by module and name."""
    gc.collect()
    found = Counter[str]()
    for each in gc.get_objects():
        kind = type(each)
        if str(kind.__module__).partition(".")[0] in OURS:
            name = f"{kind.__module__}.{kind.__qualname__}"
            found[name] += 1
            for attribute, value in attributes(each):
                found[f"{name}.{attribute}"] += entries(value)
    for module in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        for attribute, value in list(vars(sys.modules[module]).items()):
            found[f"{module}.{attribute}"] += entries(value)
    return dict(+found)


def watch(path: str) -> None:
    """Have engines write the lines, between two steps: JAX on the CPU does not take the cache as a donation while
    somebody else holds a view of it, as `gc.get_objects` may do.
    """
    from chat_server import engine

    asked = threading.Event()

    class WatchedEngine(engine.Engine):
        def start(self) -> None:
            signal.signal(signal.SIGUSR1, self.ask)
            super().start()

        def ask(self, *_: object) -> None:
            asked.set()
            with self._changed:
                self._changed.notify()

        def step(self) -> bool:
            if asked.is_set():
                asked.clear()
                with open(path, "a") as file:
                    file.write(json.dumps(held()) + "\n")
            return super().step()

    engine.Engine = WatchedEngine  # type: ignore[misc]


if __name__ == "__main__":
    watch(sys.argv.pop(1))
    from chat_server.__main__ import main

    sys.exit(main())
