"""Kills one process after the other in its part of the memory, and watches the bytes and the signs of the death.

    python late_writes_lane.py LANE

LANE is a `Lane` as JSON. Prints one JSON object for each round: what happened, or "error". `late_writes.py` starts it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from late_writes_engine import (
    ENDED,
    GRANDCHILD,
    LOADS,
    MICROSECONDS,
    QUEUED,
    REGISTERED,
    REGISTERING,
    STATE,
    STORES,
    SUBMITTED,
    Plan,
    lock_record,
    map_part,
    word_of,
)

ENGINE = Path(__file__).resolve().parent / "late_writes_engine.py"
SIGNS = ("pidfd", "EOF", "lock")
START_SECONDS = 60.0  # until copies are queued; the first engine compiles kernels
DEATH_SECONDS = 30.0  # until all signs of a death are there
SAMPLE_BYTES = 256 << 10  # a word of each is watched; the copy engine takes 5 us for so many
SLICE_BYTES = 1 << 20  # copied between two looks at the samples

Sign = Callable[[], bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lane:
    """What a lane does.

    Attributes:
        plan: of all its processes but for `tag` and `socket`, as a dict.
        rounds, first_tag: how many rounds, and the tag of the first.
        end: `time.monotonic()` after which no round begins.
        settle_seconds: how long bytes are watched after the last sign.
    """

    plan: dict[str, Any]
    rounds: int
    first_tag: int
    end: float
    settle_seconds: float
    seed: int


class Watch:
    """Looks at a word of every `SAMPLE_BYTES`, and at signs, as often as it can.

    Attributes:
        seen: when each sign was first seen, seconds of `time.monotonic`. "all" is when the last of `SIGNS` was.
        late: whether samples changed between two looks that both came after all signs.
        longest_gap: seconds between two looks, from the kill on.
        snapshot: of all bytes, made in slices from "all" on.
    """

    def __init__(self, part: npt.NDArray[np.uint8]) -> None:
        self.part, self.words = part, part.view(np.uint64)
        self.samples = self.words[:: min(SAMPLE_BYTES, part.nbytes // 64) // 8]
        self.seen: dict[str, float] = {}
        self.late = False
        self.longest_gap = 0.0
        self.last_change = 0.0
        self.snapshot = np.zeros_like(part)
        self.snapshot.fill(1)  # now, so that slices are not slowed down by new pages
        self._copied = 0
        self._last, self._looked = self.samples.copy(), time.monotonic()

    def look(self) -> bool:
        """Whether samples have changed since the last look."""
        began = time.monotonic()
        now_there = self.samples.copy()
        ended = time.monotonic()
        changed = not np.array_equal(now_there, self._last)
        if changed:
            self.last_change = ended
            self.late |= self.seen.get("all", ended) <= self._looked
        self.longest_gap = max(self.longest_gap, began - self._looked)
        self._last, self._looked = now_there, began
        return changed

    def until_changing(self, end: float) -> None:
        while not self.look():
            if time.monotonic() > end:
                raise TimeoutError("no byte changed, although stores are queued")

    def until_quiet(self, signs: dict[str, Sign], settle_seconds: float) -> None:
        """Until all signs are seen and `settle_seconds` have passed since the last one."""
        self.longest_gap, missing, end = 0.0, dict(signs), time.monotonic() + DEATH_SECONDS
        while missing or time.monotonic() < max(self.seen.values()) + settle_seconds or self._copied < self.part.nbytes:
            for sign in [sign for sign, is_there in missing.items() if is_there()]:
                self.seen[sign] = time.monotonic()
                del missing[sign]
            if "all" not in self.seen and not set(SIGNS) & set(missing):
                self.seen["all"] = time.monotonic()
            self.look()
            if "all" in self.seen and self._copied < self.part.nbytes:
                piece = slice(self._copied, self._copied + SLICE_BYTES)
                self.snapshot[piece] = self.part[piece]
                self._copied += SLICE_BYTES
            if time.monotonic() > end:
                raise TimeoutError(f"{', '.join(missing)} not seen in {DEATH_SECONDS} seconds; seen: {self.seen}")

    def changed_bytes(self) -> int:
        """That differ from the snapshot."""
        starts = range(0, self.part.nbytes, 64 * SLICE_BYTES)
        pieces = [slice(start, start + 64 * SLICE_BYTES) for start in starts]
        return sum(int(np.count_nonzero(self.part[piece] != self.snapshot[piece])) for piece in pieces)

    def foreign_words(self, tag: int) -> int:
        """How many words, one looked at in each page, an engine of another round wrote."""
        tags = self.words[::512] >> np.uint64(40)
        return int(np.count_nonzero((tags != 0) & (tags != tag)))


def readable(descriptor: int) -> Sign:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return lambda: bool(poll.poll(0))


def ended(connection: socket.socket) -> Sign:
    def is_there() -> bool:
        try:
            return connection.recv(1) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    connection.setblocking(False)
    return is_there


def unlocked(descriptor: int, number: int) -> Sign:
    """Whether nobody has byte `number` locked any more."""
    asked = lock_record(fcntl.F_WRLCK, number)

    def is_there() -> bool:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, asked)
        return bool(struct.unpack_from("h", answer)[0] == fcntl.F_UNLCK)

    return is_there


def kill_one(lane: Lane, tag: int, rng: random.Random) -> dict[str, Any]:
    """A round: start a process, kill it while copies are queued, watch."""
    plan = Plan(**lane.plan)
    page, part = map_part(plan)
    page[:] = 0
    part[:] = 0
    loaded = slice(STORES * plan.slot_bytes, (STORES + LOADS) * plan.slot_bytes)
    part[loaded].view(np.uint64)[:] = word_of(tag, 100)
    ours, theirs = socket.socketpair()
    descriptors: list[int] = []
    with ours, tempfile.TemporaryFile() as complaints:
        with theirs:
            plan = dataclasses.replace(plan, tag=tag, socket=theirs.fileno())
            child = subprocess.Popen(
                [sys.executable, str(ENGINE), "kill", plan.as_json()],
                pass_fds=(plan.memory, plan.socket),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
            )
        try:
            descriptors.append(os.pidfd_open(child.pid))
            watch = Watch(part)
            wait_for_state(child, page, complaints, REGISTERING if plan.variant == "registration" else QUEUED)
            signs = {"pidfd": readable(descriptors[0]), "EOF": ended(ours), "lock": unlocked(plan.memory, plan.number)}
            if plan.variant.startswith(("fork", "exec")):
                descriptors.append(os.pidfd_open(int(page[GRANDCHILD])))
                signs["grandchild"] = readable(descriptors[1])
            early = [sign for sign, is_there in signs.items() if is_there()]
            if early:
                raise RuntimeError(f"before the kill there is already: {', '.join(early)}")
            if plan.variant != "registration":
                watch.until_changing(time.monotonic() + 10)
            time.sleep(rng.random() * 0.03)
            watch.look()
            killed = time.monotonic()
            words = page.copy()
            signal.pidfd_send_signal(descriptors[0], signal.SIGKILL)
            watch.until_quiet(signs, lane.settle_seconds)
            queued = int(words[SUBMITTED] - words[ENDED])
            return {
                "queued": queued,
                "queued_seconds": queued * float(words[MICROSECONDS]) / 1e6 / max(1, int(words[ENDED])),
                "registering": bool(words[STATE] != REGISTERED),
                "seen": {sign: when - killed for sign, when in watch.seen.items()},
                "last_change": watch.last_change - killed,
                "late": watch.late,
                "longest_gap": watch.longest_gap,
                "changed_bytes": watch.changed_bytes(),
                "foreign_words": watch.foreign_words(tag),
                "loaded_slots_intact": bool(np.all(part[loaded].view(np.uint64) == word_of(tag, 100))),
            }
        finally:
            child.kill()
            child.wait(30)
            for descriptor in descriptors:
                os.close(descriptor)


def wait_for_state(child: subprocess.Popen[bytes], page: npt.NDArray[np.uint64], complaints: Any, state: int) -> None:
    end = time.monotonic() + START_SECONDS
    while page[STATE] < state:
        if child.poll() is not None or time.monotonic() > end:
            complaints.seek(0)
            said = complaints.read().decode(errors="replace").strip()
            raise RuntimeError(f"the engine's process, status {child.poll()}, queued nothing: {said}")
        time.sleep(0.0005)


def main(lane: Lane) -> None:
    rng, failures = random.Random(lane.seed), 0
    for number in range(lane.rounds):
        if time.monotonic() > lane.end or failures > 2:
            return
        try:
            found = kill_one(lane, lane.first_tag + number, rng)
        except Exception as error:  # the others may succeed
            failures += 1
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"variant": lane.plan["variant"], "tag": lane.first_tag + number, **found}), flush=True)


if __name__ == "__main__":
    main(Lane(**json.loads(sys.argv[1])))
