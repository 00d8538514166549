"""One try: a scenario interrupted at one point, and what is wrong afterwards. A worker process makes many of them.

    python trials.py < units        reads one `Unit` a line (JSON), prints one report a line (JSON)

The interrupted call runs in the main thread, as where signals arrive; what follows runs in another one, so that a lock
that the call has kept shows as a hang. A try that does not end is reported, and the process exits with HUNG.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import json
import os
import random
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import nested_calls
import worlds
from interrupts import Methods, Outcome, Points, Signals, call_at, in_finalizer, interrupt_at
from scenarios import HOOKS, SCENARIOS, Tracing

import kvoffload
from kvoffload import KVOffloadError
from kvoffload.cache import policies
from kvoffload.cache.policies import Policy

HUNG = 3
TRY_SECONDS = 30.0
MODES = ("signal", "hook", "hook-after")
NESTED = "nested:"
NESTED_MODES = tuple(NESTED + name for name in nested_calls.NAMES)
CREATING = (
    "cuStreamCreateWithPriority", "cuEventCreate", "cuMemAlloc", "cuMemHostRegister", "cuDevicePrimaryCtxRetain",
    "cuModuleLoadData",
)  # fmt: skip


class Unit(NamedTuple):
    """Tries of one scenario.

    Attributes:
        scenario: its name.
        policy: a name in POLICIES.
        mode: "signal": KeyboardInterrupt where CPython delivers signals. "hook": RuntimeError out of a method of the
            policy or out of a hook, which has done nothing; "hook-after": which has done its work. "nested:poll": where
            CPython delivers signals `poll` is called, and so on for each name of `nested_calls`.
        start: the first point to try.
        sample: how many points to try, chosen by `seed`; 0: all.
    """

    scenario: str
    policy: str
    mode: str
    start: int = 1
    sample: int = 0
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.scenario} [{self.policy}, {self.mode}]"


def points_of(unit: Unit) -> Points:
    """What the exception comes out of."""
    if unit.mode == "signal" or unit.mode.startswith(NESTED):
        return Signals(worlds.__file__)
    maker = worlds.POLICIES[unit.policy]
    owner = maker if isinstance(maker, type) else type(policies.make_policy(maker, 1))
    names = [name for name in vars(Policy) if callable(getattr(owner, name, None))]
    methods = [getattr(owner, name) for name in names if name not in ("__init__", "__class_getitem__", "__module__")]
    return Methods(*methods, *HOOKS, after=unit.mode == "hook-after")


class Trial(NamedTuple):
    """What came of one try."""

    outcome: Outcome
    problems: list[str]
    notes: list[str]


def attempt(unit: Unit, number: int, points: Points) -> Trial:
    """Make the scenario's call, with the exception or another call at its point `number`; then verify."""
    scenario = SCENARIOS[unit.scenario]
    world, nested = scenario.prepared(unit.policy), None
    if unit.mode.startswith(NESTED):
        nested = nested_calls.Nested(world, unit.mode.removeprefix(NESTED))
    try:
        world.made = scenario.row.prepare(world) if scenario.row.prepare else None
    except KVOffloadError:
        if nested is None:  # else the nested call's handles leave no room for it
            raise
        return Trial(Outcome(None, "", False), [], [])
    call = functools.partial(scenario.row.call, world)
    if nested is not None:
        outcome, wrong = _nest(number, call, nested)
        world.made = None
        del call, nested
        return Trial(outcome, wrong + _in_another_thread(world, False), [])
    outcome = interrupt_at(number, call, KeyboardInterrupt if unit.mode == "signal" else RuntimeError, points)
    notes = []
    if outcome.point is not None and not outcome.raised:
        notes.append("in a finalizer" if outcome.in_finalizer else "swallowed")
    if world.driver is not None and world.driver.context_stack:
        notes.append("context left current")
    world.made = None
    creating = outcome.point is not None and outcome.point.kind == "driver" and outcome.point.what in CREATING
    return Trial(outcome, [] if outcome.in_finalizer else _in_another_thread(world, creating), notes)


def _nest(number: int, call: Callable[[], object], nested: nested_calls.Nested) -> tuple[Outcome, list[str]]:
    if not nested.exists:
        return Outcome(None, "", False), []
    kvoffload.set_tracer(Tracing())
    try:
        outcome, error = call_at(number, call, nested)
    finally:
        kvoffload.set_tracer(None)
    return outcome, nested_calls.wrong_error(error) + nested.problems


def _in_another_thread(world: Any, creating: bool) -> list[str]:
    found: list[str] = []

    def verify() -> None:
        try:
            found.extend(world.problems(creating))
        except BaseException as error:
            found.append(f"broken: {traceback.format_exception_only(error)[-1].strip()}")

    thread = threading.Thread(target=verify, daemon=True)
    thread.start()
    thread.join(TRY_SECONDS * 0.8)
    if thread.is_alive():
        where = traceback.extract_stack(sys._current_frames()[thread.ident or 0])[-1]
        return [*found, f"hang: for ever at {where.filename.rpartition('/')[2]}:{where.lineno} {where.name}"]
    return found


def tries(unit: Unit) -> Iterator[dict[str, Any]]:
    """Reports: one for each try with a problem or a note, and one at the end."""
    points = points_of(unit)
    clean, counts = uninterrupted(unit.scenario, unit.policy)
    numbers: Any = range(unit.start, 1_000_000)
    if unit.sample and unit.start == 1:
        chosen = random.Random(f"{unit} {unit.seed}")
        points_there = counts["signal" if unit.mode.startswith(NESTED) else unit.mode]
        numbers = sorted(chosen.sample(range(1, points_there + 1), min(unit.sample, points_there)))
    tried = 0
    if clean:
        yield {"unit": unit, "number": 0, "point": "uninterrupted", "problems": clean, "notes": []}
    for number in numbers:
        watch(unit, number)
        trial = attempt(unit, number, points)
        if trial.outcome.point is None:
            if unit.sample:  # a call that polls has more points in one run than in another
                continue
            break
        tried += 1
        yield {
            "unit": unit,
            "number": number,
            "point": str(trial.outcome.point),
            "problems": trial.problems,
            "notes": trial.notes,
        }
        if any(each.startswith("hang: for ever") for each in trial.problems):
            sys.stdout.flush()
            os._exit(HUNG)  # the thread that hangs may hold what the next try needs
    watch(None, 0)
    yield {"unit": unit, "end": True, "tried": tried}


@functools.cache
def uninterrupted(scenario: str, policy: str) -> tuple[list[str], dict[str, int]]:
    """What is wrong after a scenario of which nothing was interrupted; its points by mode, counted in that run.

    What happens once in a process happens in the run before.
    """
    unit = Unit(scenario, policy, MODES[0])
    for _ in range(2):
        counting = Counting({mode: points_of(unit._replace(mode=mode)) for mode in MODES})
        trial = attempt(unit, 0, counting)
    return trial.problems + [f"broken: {error}" for error in (trial.outcome.error,) if error], counting.counts


class Counting:
    """Points of several modes, counted: no point of its own."""

    def __init__(self, points: dict[str, Points]) -> None:
        self._points = points
        self.counts = dict.fromkeys(points, 0)

    def kind_of(self, frame: FrameType, event: str, argument: Any) -> str | None:
        for mode, points in self._points.items():
            if points.kind_of(frame, event, argument) is not None and not in_finalizer(frame):
                self.counts[mode] += 1
        return None


_watched: dict[str, Any] = {"unit": None, "number": 0, "since": 0.0}


def watch(unit: Unit | None, number: int) -> None:
    """Have the process end if this try does not; None: nothing is tried."""
    _watched.update(unit=unit, number=number, since=time.monotonic())


def _watchdog() -> None:
    while True:
        time.sleep(0.5)
        unit = _watched["unit"]
        if unit is not None and time.monotonic() - _watched["since"] > TRY_SECONDS:
            faulthandler.dump_traceback(sys.stderr)
            report = {"unit": unit, "number": _watched["number"], "point": "?", "problems": ["hang: the call"]}
            print(json.dumps({**report, "notes": []}), flush=True)
            os._exit(HUNG)


def main() -> None:
    """Work the units of standard input off."""
    warnings.simplefilter("ignore")
    units = [Unit(*json.loads(line)) for line in sys.stdin]
    threading.Thread(target=_watchdog, daemon=True).start()
    gc.collect()
    gc.freeze()
    for unit in units:
        for report in tries(unit):
            print(json.dumps(report), flush=True)
    sys.stdout.flush()
    os._exit(0)  # devices that a try has broken are not closed


if __name__ == "__main__":
    main()
