"""Waiting on the host by polling."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvoffload.internal.checks import as_timeout


def wait_until(condition: Callable[[], bool], timeout: float | None, what: str) -> None:
    """Poll `condition` with sleeps that grow from nothing to 0.2 ms, so that Ctrl-C and timeouts work.

    A sleep is a fiftieth of the time waited so far, so it delays the caller by at most 2%. Linux adds 50 us to every
    sleep (its timer slack), so there is none in the first 2.5 ms.

    Raises:
        TimeoutError: `timeout` seconds have passed.
        ValueError: `timeout` is no number of seconds.
    """
    timeout = as_timeout(timeout)
    begin = time.perf_counter()
    while not condition():
        waited = time.perf_counter() - begin
        if timeout is not None and waited >= timeout:
            raise TimeoutError(f"{what}: not done within {timeout:g} seconds; still going on")
        time.sleep(0.0 if waited < 2.5e-3 else min(2e-4, waited / 50))
