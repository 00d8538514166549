"""Measures how long a GPU goes on to change shared memory after the process that queued the copies was killed.

    python tests/chaos/support/late_writes.py                        everything: three minutes, one NVIDIA GPU
    python tests/chaos/support/late_writes.py --only copies --rounds 100
    python tests/chaos/support/late_writes.py --simulated            without a GPU; the device dies with its process

Processes share a memfd. Each round starts one that registers a part of it and opens an engine there. While its copies
are queued it is killed. Another process watches the bytes, and three signs of the death: the process's pidfd is
readable, its socket has ended, and its lock (F_OFD_SETLK) on the memfd is gone. Several rounds run at the same time,
and beside them an engine that stores, loads and compares in a part of its own.

    copies              stores and loads of 64 MiB slots
    pack                stores that kernels pack and contiguous copies carry
    registration        a second engine registers memory while the first one copies
    fork                the process has forked; the grandchild sleeps, with all descriptors
    fork, ours closed   the same, and the grandchild closes socket, memfd and lock, but nothing of the driver
    fork, writing       the same, and the grandchild itself writes: what a late write looks like to this program
    exec                the grandchild is another program, without the descriptors (close_fds=True)
    exec, open          the same with close_fds=False
    quick               many deaths, small slots, short queues

It prints for each variant the longest time from each sign to the last change (negative: it came before the sign), and
in how many rounds bytes changed after all three signs. Two searches find that: samples, a word of every 256 KiB, looked
at all the time; and at the end a comparison of all bytes with a copy that was begun at the last sign. With OUT set, all
rounds go to $OUT/late_writes.json.

Exit status 1 if a round failed, if the engine beside them found a wrong byte, if bytes changed after all three signs
where no grandchild was made to hide the death, or if the writes of "fork, writing" were not seen.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from exhausting import HERE, started
from late_writes_engine import LOADS, PAGE, QUEUED, STATE, STORES, Plan
from late_writes_lane import ENGINE, SIGNS, Lane

MIB = 1 << 20
NEIGHBOUR_SLOTS = 8
SPARE_SECONDS = 75.0  # that a lane may need for a round that it has begun

Found = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """How often, how many at the same time, and of what size. `depth`: transfers of each direction in flight."""

    rounds: int
    lanes: int = 1
    slot_bytes: int = 64 * MIB
    depth: int = 200
    settle_seconds: float = 2.0
    more_slots: int = 0
    hides: bool = False  # the death, from the signs that the caller can see


VARIANTS = {
    "copies": Variant(20, lanes=4),
    "pack": Variant(6, lanes=2),
    "registration": Variant(6, lanes=2, more_slots=16),
    "fork": Variant(4, depth=500),
    "fork, ours closed": Variant(4, depth=500, hides=True),
    "fork, writing": Variant(2, slot_bytes=4 * MIB, depth=20, hides=True),
    "exec": Variant(4, depth=500),
    "exec, open": Variant(4, depth=500, hides=True),
    "quick": Variant(200, lanes=8, slot_bytes=4 * MIB, depth=60, settle_seconds=0.3),
}
TOGETHER = (
    ("copies",),
    ("fork", "fork, ours closed", "exec", "exec, open"),
    ("pack", "registration"),
    ("quick", "fork, writing"),
)
LONGEST = 500  # characters of an error's end


def started_with(memory: int, *arguments: object) -> subprocess.Popen[str]:
    return started(*arguments, pass_fds=(memory,), stdin=subprocess.PIPE, stderr=subprocess.PIPE)


def answers(process: subprocess.Popen[str], seconds: float) -> tuple[list[Found], list[str]]:
    """The JSON lines that it prints until it ends, and what went wrong. Kills it, and all it has started."""
    problems = []
    try:
        out, errors = process.communicate(timeout=max(0.1, seconds))
    except subprocess.TimeoutExpired:
        kill_session(process)
        problems.append(f"not ended in {seconds:.0f} seconds")
        try:
            out, errors = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            return [], [*problems, "and not even when killed"]
    kill_session(process)
    if process.returncode:
        problems.append(f"status {process.returncode}: {errors.strip()[-LONGEST:]}")
    return [json.loads(line) for line in out.splitlines() if line.endswith("}")], problems


def kill_session(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def allocated(nbytes: int) -> Iterator[int]:
    """The descriptor of a memfd whose size is sealed."""
    descriptor = os.memfd_create("late-writes", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        os.posix_fallocate(descriptor, 0, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        yield descriptor
    finally:
        os.close(descriptor)


def plans(variants: dict[str, Variant], memory: int, simulated: bool) -> tuple[list[Plan], int]:
    """A plan for each lane, the last one for the neighbour, and the bytes of the memory."""
    lanes = [(name, variant) for name, variant in variants.items() for _ in range(variant.lanes)]
    made, start = [], (len(lanes) + 1) * PAGE
    for number, (name, variant) in enumerate(lanes):
        slots = STORES + LOADS + variant.more_slots
        grandchild = 0.3 if simulated else 3.0
        plan = Plan(
            variant=name, simulated=simulated, memory=memory, number=number, first_byte=start, slots=slots,
            slot_bytes=variant.slot_bytes, depth=variant.depth, grandchild_seconds=grandchild,
        )  # fmt: skip
        made.append(plan)
        start += slots * variant.slot_bytes
    size = min(MIB, lanes[0][1].slot_bytes)
    beside = Plan(
        variant="neighbour", simulated=simulated, memory=memory, number=len(lanes), first_byte=start,
        slots=NEIGHBOUR_SLOTS, slot_bytes=size,
    )  # fmt: skip
    made.append(beside)
    return made, start + NEIGHBOUR_SLOTS * size


def run_together(variants: dict[str, Variant], seconds: float, simulated: bool, seed: int) -> Found:
    """All rounds of some variants, at the same time. Begins no round after `seconds`."""
    rounds: list[Found] = []
    problems: list[str] = []
    with allocated(plans(variants, -1, simulated)[1]) as memory:
        *lanes, beside = plans(variants, memory, simulated)[0]
        processes = [neighbour := started_with(memory, ENGINE, "neighbour", beside.as_json())]
        try:
            page = np.memmap(f"/proc/self/fd/{memory}", np.uint64, "r", beside.number * PAGE, PAGE // 8)
            ready = time.monotonic() + 30
            while page[STATE] != QUEUED and time.monotonic() < ready and neighbour.poll() is None:
                time.sleep(0.01)
            end = time.monotonic() + seconds
            for plan in lanes:
                variant = variants[plan.variant]
                lane = Lane(
                    plan=asdict(plan), rounds=-(-variant.rounds // variant.lanes), first_tag=1 + (plan.number << 12),
                    end=end, settle_seconds=variant.settle_seconds, seed=seed + plan.number,
                )  # fmt: skip
                processes.append(started_with(memory, HERE / "late_writes_lane.py", json.dumps(asdict(lane))))
            for process in processes[1:]:
                found, wrong = answers(process, end + SPARE_SECONDS - time.monotonic())
                rounds += found
                problems += wrong
            compared, wrong = answers(neighbour, 30)  # which ends its standard input
            problems += [f"neighbour: {each}" for each in wrong]
        finally:
            for process in processes:
                kill_session(process)
    total = compared[0] if compared else {"rounds": 0, "wrong": 0}
    return {"rounds": rounds, "problems": problems, "neighbour": total}


# what was found -------------------------------------------------------------------------------------------------------


def summary(name: str, rounds: Sequence[Found]) -> Found:
    """The figures of a variant, of its rounds without an error. Times in milliseconds; None: never."""
    done = [each for each in rounds if "error" not in each]

    def most(seconds: Iterator[float]) -> float | None:
        return max((1000 * each for each in seconds), default=None)

    return {
        "variant": name,
        "kills": len(done),
        "errors": [each["error"] for each in rounds if "error" in each],
        "least_queued": min((each["queued"] for each in done), default=0),
        "queued_ms": 1000 * float(np.median([each["queued_seconds"] for each in done])) if done else 0.0,
        "most_ms_to": {
            sign: most(each["seen"][sign] for each in done if sign in each["seen"]) for sign in (*SIGNS, "grandchild")
        },
        "most_ms_to_last_change": most(each["last_change"] for each in done),
        "most_ms_of_last_change_after": {
            sign: most(each["last_change"] - each["seen"][sign] for each in done if sign in each["seen"])
            for sign in (*SIGNS, "all", "grandchild")
        },
        "changed_after_all": sum(each["late"] for each in done),
        "differ_at_the_end": sum(each["changed_bytes"] > 0 for each in done),
        "written_by_others": sum(each["foreign_words"] > 0 for each in done),
        "loaded_slots_changed": sum(not each["loaded_slots_intact"] for each in done),
        "registering": sum(each["registering"] for each in done),
        "longest_gap_ms": most(each["longest_gap"] for each in done),
    }


def is_late(found: Found) -> bool:
    """Whether bytes changed after all three signs."""
    return any(found[name] for name in ("changed_after_all", "differ_at_the_end", "written_by_others"))


HEADING = (
    f"{'':38}  {'ms from the kill to':^40}{'ms from a sign to the last change':^40}     gap{'late, by':>12}\n"
    f"{'variant':18} kills queued{'for ms':>8}{'pidfd':>8}{'EOF':>8}{'lock':>8}{'gchild':>8}{'change':>8}"
    f"{'pidfd':>8}{'EOF':>8}{'lock':>8}{'all':>8}{'gchild':>8}{'ms':>8}{'samples':>9}{'bytes':>7}{'next':>6}"
)


def line(found: Found) -> str:
    """`queued`: the fewest transfers at a kill. A negative time: the last change was before the sign. `next`: rounds
    that found words of an earlier one.
    """
    times = [
        *(found["most_ms_to"][sign] for sign in (*SIGNS, "grandchild")),
        found["most_ms_to_last_change"],
        *(found["most_ms_of_last_change_after"][sign] for sign in (*SIGNS, "all", "grandchild")),
        found["longest_gap_ms"],
    ]
    shown = "".join(f"{'-' if ms is None else format(ms, '.2f'):>8}" for ms in times)
    late = f"{found['changed_after_all']:9}{found['differ_at_the_end']:7}{found['written_by_others']:6}"
    return f"{found['variant']:18}{found['kills']:6}{found['least_queued']:7}{found['queued_ms']:8.0f}{shown}{late}"


def small(variant: Variant) -> Variant:
    """For the simulated device."""
    return Variant(
        2, slot_bytes=64 << 10, depth=4, settle_seconds=0.1, more_slots=min(2, variant.more_slots), hides=variant.hides
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Late writes of a GPU whose process was killed.")
    parser.add_argument("--only", action="append", choices=VARIANTS, help="may be given several times")
    parser.add_argument("--rounds", type=int, help="of each variant")
    parser.add_argument("--seconds", type=float, default=150.0, help="begin no round after so many (default 150)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args(arguments)
    chosen = {name: small(each) if options.simulated else each for name, each in VARIANTS.items()}
    if options.rounds:
        chosen = {name: Variant(**{**asdict(each), "rounds": options.rounds}) for name, each in chosen.items()}
    end, summaries, raw, bad = time.monotonic() + options.seconds, [], [], False
    possible = set(VARIANTS) - ({"pack"} if options.simulated else set())
    groups = [[name for name in names if name in possible & set(options.only or VARIANTS)] for names in TOGETHER]
    groups = [names for names in groups if names]
    print(HEADING, flush=True)
    for number, names in enumerate(groups):
        seconds = 2 * (end - time.monotonic()) / (1 + len(groups) - number)
        try:
            found = run_together({name: chosen[name] for name in names}, seconds, options.simulated, options.seed)
        except Exception as error:  # the next ones may run
            found = {"rounds": [], "problems": [repr(error)], "neighbour": {"rounds": 0, "wrong": 0}}
        raw += found["rounds"]
        for name in names:
            made = summary(name, [each for each in found["rounds"] if each["variant"] == name])
            summaries.append(made)
            bad |= bool(made["errors"]) or not made["kills"] or made["loaded_slots_changed"] > 0
            bad |= is_late(made) and not chosen[name].hides
            bad |= not made["least_queued"] and not options.simulated
            bad |= name == "fork, writing" and made["changed_after_all"] < made["kills"]
            often = Counter(each[-LONGEST:] for each in made["errors"]).most_common(3)
            print(line(made), *(f"{count} times: {text}" for text, count in often), sep="\n  ", flush=True)
        neighbour = found["neighbour"]
        bad |= bool(found["problems"]) or neighbour["wrong"] > 0 or not neighbour["rounds"]
        print(f"  beside them: {neighbour['rounds']} rounds compared, {neighbour['wrong']} wrong", flush=True)
        print(*(f"  {each}" for each in found["problems"]), sep="\n", end="\n" if found["problems"] else "", flush=True)
        write_out({"summaries": summaries, "rounds": raw, "simulated": options.simulated})
    return int(bad)


def write_out(result: Found) -> None:
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "late_writes.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all processes are killed
    sys.exit(main())
