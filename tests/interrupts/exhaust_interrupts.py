"""Interrupt every public call at every point, and verify what it leaves.

    python tests/interrupts/exhaust_interrupts.py                              all points of all: over half an hour
    python tests/interrupts/exhaust_interrupts.py --scenario cache.store       those whose name starts so
    python tests/interrupts/exhaust_interrupts.py --sample 20 --seed 7         20 points of each
    python tests/interrupts/exhaust_interrupts.py --mode nested:                every other call at every point: hours
    python tests/interrupts/exhaust_interrupts.py --scenario engine.close --number 17 --policy lru    one try, in detail

It prints for each scenario how many points were tried and what was wrong afterwards, and at the end the totals of wrong
hits, hangs and leaks. Exit status 1 if anything was wrong. What a point is says `interrupts.py`, what is verified
`worlds.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SUPPORT = HERE.parent / "support"  # the tier of the worlds is there
sys.path.append(str(SUPPORT))
from scenarios import SCENARIOS  # noqa: E402
from trials import HUNG, MODES, NESTED, NESTED_MODES, Unit, attempt, points_of  # noqa: E402

KINDS = ("wrong hit", "wrong bytes", "check()", "lost", "broken", "hang", "leak", "violation")


@dataclass
class Tally:
    """What the tries of some scenarios have shown."""

    tried: int = 0
    failed: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    def add(self, report: dict[str, Any]) -> None:
        self.tried += report["number"] > 0
        self.failed += bool(report["problems"])
        self.notes.update(report["notes"])
        kinds = [next(kind for kind in KINDS if each.startswith(kind)) for each in report["problems"]]
        self.problems.update(set(kinds))
        if report["problems"]:
            unit = Unit(*report["unit"])
            self.examples.append(f"{unit} point {report['number']}, {report['point']}: {'; '.join(report['problems'])}")


def units_of(
    names: Iterable[str], policies: Sequence[str] = (), modes: Sequence[str] = MODES, sample: int = 0, seed: int = 0
) -> list[Unit]:
    """The units of the scenarios whose names start with one of `names`."""
    prefixes = tuple(names)
    return [
        Unit(name, policy, mode, 1, sample, seed)
        for name, scenario in SCENARIOS.items()
        if name.startswith(prefixes)
        for policy in scenario.policies
        for mode in modes
        if not policies or policy in policies
    ]


def work_off(units: Sequence[Unit], jobs: int = 1, seconds: float = float("inf")) -> dict[str, Tally]:
    """Try all that can be begun within `seconds`, in `jobs` processes; what came of it by scenario."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    lock, queue = threading.Lock(), list(units)
    end = time.monotonic() + seconds
    pieces = 32 if seconds < float("inf") else 4 if jobs > 1 else 1  # for each job: a process takes a second to start
    share = max(1, len(units) // (jobs * pieces))

    def feed() -> None:
        while True:
            with lock:
                mine = [queue.pop(0) for _ in range(min(len(queue), share))]
            if not mine or time.monotonic() > end:
                return
            _work_off(mine, tallies, lock)

    threads = [threading.Thread(target=feed) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tallies


def _work_off(units: list[Unit], tallies: dict[str, Tally], lock: threading.Lock) -> None:
    """In one process; in a new one after each try that hangs or kills it."""
    while units:
        first, last = 0, 0  # of the units; of its tries
        with _start() as worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write("".join(json.dumps(unit) + "\n" for unit in units))
            worker.stdin.close()
            for line in worker.stdout:
                report = json.loads(line)
                if report.get("end"):
                    first, last = first + 1, 0
                    continue
                last = report["number"]
                with lock:
                    tallies[report["unit"][0]].add(report)
        units = units[first:]
        if units:
            _note_end(units[0], last + 1, worker.returncode, tallies, lock)
            if units[0].sample:  # the rest of a sample is given up
                units = units[1:]
            else:
                units = [units[0]._replace(start=last + 1 + (worker.returncode != HUNG)), *units[1:]]


def _note_end(unit: Unit, number: int, status: int, tallies: dict[str, Tally], lock: threading.Lock) -> None:
    """A worker that a try has killed. (One that hung has reported it.)"""
    if status != HUNG:
        problems = [f"broken: the process ended with status {status}"]
        with lock:
            tallies[unit.scenario].add(
                {"unit": unit, "number": number, "point": "?", "problems": problems, "notes": []}
            )


def _start() -> subprocess.Popen[str]:
    paths = [*map(str, (HERE.parent.parent, HERE, SUPPORT)), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COV_"))}
    return subprocess.Popen(
        [sys.executable, str(HERE / "trials.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**environment, "PYTHONPATH": os.pathsep.join(paths)},
    )


def table(tallies: dict[str, Tally]) -> str:
    """A line for each scenario, and the totals."""
    width = max(map(len, [*tallies, "scenario"]))
    lines = [f"{'scenario':{width}} {'tried':>7} {'failed':>7}  what was wrong"]
    total: Tally = Tally()
    for name, tally in sorted(tallies.items()):
        wrong = ", ".join(f"{count} {kind}" for kind, count in tally.problems.items())
        notes = ", ".join(f"{count} {note}" for note, count in tally.notes.items())
        lines.append(f"{name:{width}} {tally.tried:7} {tally.failed:7}  {wrong}{f' ({notes})' if notes else ''}")
        total.tried, total.failed = total.tried + tally.tried, total.failed + tally.failed
        total.problems.update(tally.problems)
        total.notes.update(tally.notes)
    lines.append(f"{'total':{width}} {total.tried:7} {total.failed:7}")
    lines += [f"  {total.problems[kind]:6} {kind}" for kind in KINDS]
    lines += [f"  {count:6} note: {note}" for note, count in total.notes.items()]
    return "\n".join(lines)


def _show(unit: Unit, number: int) -> int:
    trial = attempt(unit, number, points_of(unit))
    print(f"{unit}, point {number}: {trial.outcome}", *trial.notes, *trial.problems, sep="\n  ")
    return int(bool(trial.problems))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", action="append", help="names start with this; may be repeated")
    parser.add_argument("--policy", action="append", default=[], help="prefix, lru, user; all by default")
    parser.add_argument(
        "--mode",
        action="append",
        choices=(*MODES, *NESTED_MODES, NESTED),
        help=f"what raises, or is called; {', '.join(MODES)} by default; {NESTED} stands for every nested call",
    )
    parser.add_argument("--sample", type=int, default=0, help="points of each scenario, policy and mode; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after so many")
    parser.add_argument("--number", type=int, help="try this point alone, in this process")
    parser.add_argument("--list", action="store_true", help="print the names of the scenarios")
    parser.add_argument("--examples", type=int, default=3, help="failures shown of each scenario")
    options = parser.parse_args(arguments)
    modes = [mode for each in options.mode or MODES for mode in (NESTED_MODES if each == NESTED else (each,))]
    units = units_of(options.scenario or [""], options.policy, modes, options.sample, options.seed)
    if options.list:
        print(*dict.fromkeys(unit.scenario for unit in units), sep="\n")
        return 0
    if options.number is not None:
        return max(_show(unit, options.number) for unit in units)
    if options.sample:
        random.Random(options.seed).shuffle(units)  # so that what fits into --seconds is of all kinds
    tallies = work_off(units, options.jobs, options.seconds)
    for tally in tallies.values():
        print(*tally.examples[: options.examples], sep="\n", end="\n" if tally.examples else "")
    print(table(tallies))
    return int(any(tally.failed for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
