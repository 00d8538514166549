"""Engines that share a pool, and its owner, are killed and stopped at random moments: `python chaos_pool.py JSON`.

Each process is a fork of this one, which has no threads and no CUDA context. Engines store, load, fetch, reserve, lease
and remove keys at random, and compare every block that they load with what its key stands for. Key `i` stands for block
`i`, whose bytes follow from the seed, so bytes of another key, and bytes that were not written yet, are wrong. So are
those that an owner's tier is told to write (`chaos_owners.py`).

Owners also close in order while engines work and tiers are slow, and the next one begins at once. Sometimes all engines
end, and the next ones have another layout, for whose region the other one makes room.

After some kills there is an audit: the engines end by themselves, then one member must be able to reserve every entry
of the pool. After others all processes are killed, and the next ones begin with an empty pool.
Prints a line of JSON: counts, and what was wrong.
"""

from __future__ import annotations

import importlib
import json
import logging
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from chaos_engines import (
    CHILD_SECONDS,
    COUNTED,
    HUNG_SECONDS,
    PLANES,
    TARGETS,
    WORD,
    Plan,
    State,
    attached,
    key_of,
    layout_of,
    run_engine,
)
from chaos_owners import AT_REST, AT_WORK, run_owner
from exhausting import counting_what_is_left

import kvoffload
from kvoffload import NO_WAIT, BlockCache, CacheIndex, CapacityError, OffloadEngine

AUDIT_SECONDS = 20.0  # until all entries are free after all engines have ended
MOST_LEAVING = 3  # owners that close, whose processes have not ended


# the one that kills ---------------------------------------------------------------------------------------------------


class Process:
    """A forked process, with the words that it shares with this one."""

    def __init__(self, run: Callable[..., None], word: Any, *arguments: Any) -> None:
        word["state"], word["stop"], word["storms"], word["longest"] = 0, 0, 0, 0.0
        word["since"] = time.monotonic()
        self.word, self.stopped = word, False
        self.pid = os.fork()
        if self.pid == 0:
            run(*arguments)
            os._exit(1)

    def signal(self, number: int) -> None:
        self.stopped = number == signal.SIGSTOP
        os.kill(self.pid, number)

    def end(self, seconds: float) -> int | None:
        """Its exit status, as of `os.waitstatus_to_exitcode`; None: it has not ended in time."""
        end = time.monotonic() + seconds
        while True:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                return None
            time.sleep(0.002)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def abort(self) -> None:
        """It hangs, and says where: see `run_engine`."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGABRT)
        time.sleep(0.5)


class Lane:
    """A pool, and what happens to its processes."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rng = plan, random.Random(plan.seed)
        self.counts, self.wrong = Counter[str](), list[str]()
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-pool-"))
        self.path = str(self.folder / "pool")
        self._shared = mmap.mmap(-1, WORD.itemsize * plan.engines)
        self.words = np.frombuffer(self._shared, WORD)
        self.engines: list[Process] = []
        self.owner: Process | None = None
        self.leaving: list[Process] = []  # owners that close
        self.other = False  # which layout the engines have
        self.longest = 0.0

    def errors(self) -> Path:
        return self.folder / f"error-{self.counts['processes']}"

    def start_owner(self) -> Process:
        self.counts["processes"] += 1
        seed = self.rng.randrange(1 << 30)
        word = np.frombuffer(mmap.mmap(-1, WORD.itemsize), WORD)[0]
        self.grace_until = time.monotonic() + self.plan.grace_seconds + 0.5  # it may take as long to start
        return Process(run_owner, word, self.plan, self.path, word, seed, self.errors())

    def start_engine(self, number: int) -> Process:
        self.counts["processes"] += 1
        word, plan = self.words[number : number + 1][0], self.plan.other if self.other else self.plan
        return Process(run_engine, word, plan, self.path, word, self.rng.randrange(1 << 30), self.errors())

    def collect(self) -> None:
        """Take over the counts of the engines' words, and look for problems."""
        for number, process in enumerate(self.engines):
            word = self.words[number]
            for name in COUNTED:
                self.counts[name] += int(word[name])
                word[name] = 0
            self.longest = max(self.longest, float(word["longest"]))
            late = time.monotonic() - float(word["since"])
            busy = State.STARTING < word["state"] < State.ENDED
            if busy and not process.stopped and late > HUNG_SECONDS:
                self.wrong.append(f"an engine hangs in {State(int(word['state'])).name} for {late:.0f} seconds")
                process.abort()
        for path in sorted(self.folder.glob("error-*")):
            stacks = path.name.endswith("-stacks")
            if text := path.read_text():
                self.wrong.append(text if stacks else text[-1500:])
            if text or not stacks:  # else the process may still say something there
                path.unlink()

    def check_alive(self) -> None:
        """Processes that have ended by themselves are wrong; start new ones."""
        for number, process in enumerate(self.engines):
            status = process.end(0.0) if not process.stopped else None
            if status is not None:
                self.wrong.append(f"an engine has ended with status {status}")
                self.engines[number] = self.start_engine(number)
        if self.owner is not None and not self.owner.stopped and (status := self.owner.end(0.0)) is not None:
            self.wrong.append(f"the owner has ended with status {status}")
            self.owner = self.start_owner()
        for owner in list(self.leaving):
            self.see_off(owner, 0.0)

    def see_off(self, owner: Process, seconds: float) -> None:
        """An owner that closes has ended, or has to in time."""
        status = owner.end(seconds)
        if status is None and not seconds:
            return
        if status is None:
            owner.kill()
        if status != 0:
            self.wrong.append(f"an owner that closes has ended with status {status}")
        self.leaving.remove(owner)

    def wait_for_progress(self) -> None:
        """Until each engine has made some calls, most of the time: else kills would all be in `attach`."""
        end = time.monotonic() + 6.0
        if self.rng.random() < 0.8:
            wanted, what = (
                (self.rng.randint(1, 60), "stored") if self.plan.closes else (self.rng.randint(1, 60), "calls")
            )
            while time.monotonic() < end and min(int(each) for each in self.words[what]) < wanted:
                time.sleep(0.002)

    def wait(self) -> None:
        longest = self.rng.choice((0.0, 0.004, 0.03, 0.03, 0.1, 0.1, 0.3, 1.3))
        time.sleep(self.rng.random() * longest)

    def kill_engine(self) -> None:
        number = self.rng.randrange(self.plan.engines)
        state = State(int(self.words[number]["state"]))
        self.engines[number].kill()
        self.counts.update({"kills": 1, "kills of engines": 1, f"in {state.name.lower()}": 1})
        if self.rng.random() < 0.3:
            self.wait()
        self.engines[number] = self.start_engine(number)

    def kill_owner(self) -> None:
        assert self.owner is not None
        self.owner.kill()
        self.counts.update({"kills": 1, "kills of owners": 1})
        self.wait()
        self.owner = self.start_owner()

    def close_owner(self) -> None:
        """The next owner begins at once, or once nobody has been there for a while; the last one may still be writing
        to its tiers, and reading.
        """
        assert self.owner is not None
        self.words["storms"] = self.rng.random() < 0.7
        time.sleep(self.rng.random() * 0.4)
        self.owner.word["stop"] = AT_WORK
        self.leaving.append(self.owner)
        self.counts.update({"kills": 1, "closes": 1})
        self.words["storms"] = 0
        if self.rng.random() < 0.5:
            self.wait()
        self.owner = self.start_owner()
        if self.rng.random() < 0.1:
            self.wait()
            self.leaving.pop().kill()
            self.counts["kills"] += 1
            self.counts["kills of closing owners"] += 1
        while len(self.leaving) > MOST_LEAVING:
            self.see_off(self.leaving[0], HUNG_SECONDS)

    def change_layout(self) -> None:
        """The engines end, some in the middle of a call, and the next ones need room for another region."""
        for process in self.engines:
            if self.rng.random() < 0.3:
                process.signal(signal.SIGKILL)
                self.counts.update({"kills": 1, "kills of engines": 1})
            process.word["stop"] = 1
        self.end_engines()
        self.other = not self.other
        self.engines = [self.start_engine(number) for number in range(self.plan.engines)]
        self.counts["changes of layout"] += 1

    def end_engines(self) -> None:
        """They have been told to end, or killed."""
        for process in self.engines:
            status = process.end(HUNG_SECONDS)
            if status is None:
                self.wrong.append(f"an engine does not end: {State(int(process.word['state'])).name}")
                process.abort()
                process.kill()
            elif status not in (0, -signal.SIGKILL):
                self.wrong.append(f"an engine has ended with status {status}")
        self.collect()
        self.engines = []

    def kill_both(self) -> None:
        assert self.owner is not None
        number = self.rng.randrange(self.plan.engines)
        os.kill(self.engines[number].pid, signal.SIGKILL)
        self.owner.kill()
        self.engines[number].kill()
        self.counts.update({"kills": 2, "kills of both": 1})
        self.wait()
        self.engines[number] = self.start_engine(number)
        self.owner = self.start_owner()

    def stop(self) -> None:
        """A process stands still for a while, in which others go on or die; then it goes on, or dies, too."""
        victims = [*self.engines, self.owner]
        victim = self.rng.choice(victims)
        assert victim is not None
        victim.signal(signal.SIGSTOP)
        self.counts["stops"] += 1
        self.wait()
        if victim is not self.owner and self.rng.random() < 0.5:
            self.kill_owner()
            self.wait()
        victim.signal(signal.SIGCONT)
        victim.word["since"] = time.monotonic()

    def kill_all(self) -> None:
        """The next processes begin with an empty pool."""
        processes = [each for each in (*self.engines, *self.leaving, self.owner) if each is not None]
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        for process in processes:
            process.kill()
        self.leaving = []
        self.counts["kills of all"] += 1

    def start_all(self) -> None:
        self.owner = self.start_owner()
        self.engines = [self.start_engine(number) for number in range(self.plan.engines)]

    def audit(self) -> None:
        """The engines end; then all entries can be had by one member."""
        assert self.owner is not None
        for process in self.engines:
            process.word["stop"] = 1
        self.end_engines()
        for owner in list(self.leaving):
            self.see_off(owner, HUNG_SECONDS)
        plan = self.plan.other if self.other else self.plan
        auditor = Process(audit_pool, self.words[0], plan, self.path, self.errors())
        if auditor.end(AUDIT_SECONDS * 2) is None:
            self.wrong.append("the auditor hangs")
            auditor.kill()
        wait = max(CHILD_SECONDS, self.grace_until - time.monotonic())
        time.sleep(wait)  # until then it leaves the socket to the next one: children of killed engines have their locks
        self.owner.word["stop"] = AT_REST
        if (status := self.owner.end(HUNG_SECONDS)) != 0:
            self.wrong.append(f"the owner has ended with status {status}")
        elif self.owner.word["calls"]:
            self.wrong.append(f"{self.owner.word['calls']} keys are held when no member is left")
        self.owner = None
        left = [each.name for each in self.folder.iterdir() if not each.name.startswith(("error-", "tier-"))]
        if left:
            self.wrong.append(f"files are left: {left}")
        self.collect()
        self.counts["audits"] += 1

    def run(self) -> None:
        end = time.monotonic() + self.plan.seconds
        self.start_all()
        while self.counts["kills"] < self.plan.kills and time.monotonic() < end and len(self.wrong) < 5:
            self.wait_for_progress()
            self.wait()
            steps = (self.kill_engine, self.kill_owner, self.close_owner, self.kill_both, self.stop, self.change_layout)
            before = self.counts["kills"]
            self.rng.choices(steps, [8, 4, 60, 2, 4, 8] if self.plan.closes else [40, 20, 25, 8, 12, 8])[0]()
            self.check_alive()
            self.collect()
            if before // self.plan.audit < self.counts["kills"] // self.plan.audit:
                if self.rng.random() < 0.5:
                    self.audit()
                else:
                    self.kill_all()
                self.start_all()
        self.audit()
        self.counts["longest call ms"] = int(1000 * self.longest)

    def close(self) -> None:
        for process in [*self.engines, *self.leaving, self.owner]:
            if process is not None:
                with suppress(ProcessLookupError, ChildProcessError):
                    process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def audit_pool(plan: Plan, path: str, errors: Path) -> None:
    """In a forked child: reserve every entry, once quarantines are over."""
    try:
        with kvoffload.open_device(backend="simulated") as device:
            planes = device.allocate_planes(PLANES, block_bytes=plan.row_bytes, num_blocks=plan.universe + TARGETS)
            with attached(path, layout_of(planes)) as pool:
                index, found, end = CacheIndex(pool), -1, time.monotonic() + AUDIT_SECONDS
                assert index.capacity == plan.capacity, f"{index.capacity} entries of {plan.capacity}"
                statistics, held = index.statistics(), -1  # hints may still bring keys, and tiers read
                while (found < plan.capacity or held) and time.monotonic() < end:
                    index.clear()
                    with suppress(CapacityError):
                        reservation = index.reserve([b"%064d" % each for each in range(plan.capacity)])
                        found = len(set(reservation.indices))
                        reservation.abort()
                    index.clear()
                    statistics = index.statistics()
                    held = statistics.resident + statistics.pending + statistics.pinned
                    time.sleep(0.02)
                assert found == plan.capacity, f"{found} of {plan.capacity} entries are free: {statistics}"
                assert held == 0, statistics
    except BaseException:
        errors.write_text(f"audit: {traceback.format_exc()}")
        os._exit(1)
    os._exit(0)


def load_modules(plan: Plan) -> None:
    """Import here what each process would import anew."""
    with kvoffload.open_device(backend="simulated") as device:
        planes = device.allocate_planes(PLANES, block_bytes=plan.row_bytes, num_blocks=4)
        with OffloadEngine(layout_of(planes), device=device, num_slots=4, staging_bytes=0) as engine:
            cache = BlockCache(engine)
            cache.keep([key_of(1)], [0], after=NO_WAIT).wait()
            cache.fetch([key_of(1)], [1], after=NO_WAIT).wait()
    importlib.import_module("kvoffload.pool.pooled_state")
    if plan.gpu >= 0:
        importlib.import_module("cuda.bindings.driver")


def run(plan: Plan) -> tuple[Counter[str], list[str]]:
    """Counts, and what was wrong."""
    load_modules(plan)
    lane = Lane(plan)
    with counting_what_is_left(lane.counts):
        try:
            lane.run()
        finally:
            lane.close()
    return lane.counts, [f"seed {plan.seed}: {each}" for each in lane.wrong]


if __name__ == "__main__":
    logging.getLogger("kvoffload").setLevel(logging.CRITICAL)
    totals, problems = run(Plan(**json.loads(sys.argv[1])))
    print(json.dumps({"counts": totals, "wrong": problems[:10]}))
