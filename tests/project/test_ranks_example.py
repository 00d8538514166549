"""Ranks in processes of their own: equal bits, one end for a transfer of all ranks, and what is left when one dies."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decoding import EXAMPLES, FITS, ON_DEMAND, PREFETCHED, TIMES, counts, run, verdicts
from programs import run_program

import kvoffload

pytestmark = pytest.mark.long

NAME = "ranks_in_processes.py"
SIMULATED = ("--device", "simulated")
PROCESS = re.compile(r"^rank \d: process (\d+)$", re.MULTILINE)


def check_ranks(output: str) -> None:
    """Both offloading modes moved blocks, and changed no bit."""
    moved, said = counts(output), verdicts(output)
    assert moved.pop(FITS) == (0, 0, 0)
    assert set(moved) == {PREFETCHED, ON_DEMAND}
    assert min(map(min, moved.values())) > 0
    assert said == {PREFETCHED: "bitwise equal", ON_DEMAND: "bitwise equal"}
    assert len(PROCESS.findall(output)) == 2


def test_two_simulated_ranks_are_bitwise_equal_and_print_no_times() -> None:
    output = run(NAME, *SIMULATED)
    check_ranks(output)
    assert TIMES.search(output) is None


def test_the_conversations_do_not_fit_into_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    example, workload = import_module("ranks_in_processes"), import_module("paged_decode.workload")
    for extent in (example.MEDIUM, workload.SMALL):
        work = workload.Workload(extent, 1000)
        assert work.blocks_at_once() < work.blocks_in_all()


def test_a_block_spoiled_in_one_rank_is_noticed() -> None:
    said = verdicts(run(NAME, *SIMULATED, "--corrupt", exit_code=1))
    assert said == {PREFETCHED: "DIFFERENT", ON_DEMAND: "DIFFERENT"}


def test_steps_that_do_not_wait_for_a_load_are_noticed() -> None:
    program = f"""
    import sys
    sys.path.insert(0, {str(EXAMPLES)!r})
    import ranks_in_processes
    ranks_in_processes.RankGroup.follow = lambda self, transfer: None
    sys.argv = ["", "--device", "simulated"]
    sys.exit(ranks_in_processes.main())
    """
    said = verdicts(run_program(program, dev_mode=False, exit_code=1))
    assert said[ON_DEMAND] == "DIFFERENT"


# processes that are killed


@contextmanager
def decoding(*options: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The example in a session of its own, in the middle of its second mode; the process, and the ranks' numbers."""
    command = [sys.executable, str(EXAMPLES / NAME), *options, "--generated", "20"]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as scheduler:
        try:
            assert scheduler.stdout is not None
            output = ""
            while "cache that fits:" not in output:
                line = scheduler.stdout.readline()
                assert line, output + (scheduler.stderr.read() if scheduler.stderr else "")
                output += line
            yield scheduler, list(map(int, PROCESS.findall(output)))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(scheduler.pid, signal.SIGKILL)


def processes_of(session: int) -> set[int]:
    """The processes of a session that have memory, which zombies have not."""
    found = set()
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, _, its_session = (each / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(its_session) == session and state != "Z":
                    found.add(int(each.name))
    return found


def shared_memory_of(process: int) -> list[str]:
    """What a process has of /dev/shm, mapped or open."""
    mapped = [line.split()[-1] for line in Path(f"/proc/{process}/maps").read_text().splitlines() if "/dev/shm" in line]
    files = [os.readlink(each) for each in Path(f"/proc/{process}/fd").iterdir() if each.is_symlink()]
    return mapped + [each for each in files if each.startswith("/dev/shm")]


def wait_for_the_end_of(session: int) -> None:
    """Until no process of a session is left: what they had mapped, shared or pinned is gone with them."""
    deadline = time.monotonic() + 60
    while left := processes_of(session):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def check_killed_rank(*options: str) -> None:
    with decoding(*options) as (scheduler, ranks):
        for process in (scheduler.pid, *ranks):
            assert shared_memory_of(process) == []
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = scheduler.communicate(timeout=60)
        assert scheduler.returncode == 1
        assert errors == f"rank 1 (process {ranks[1]}) was killed by SIGKILL; the other ranks are ended\n"
        wait_for_the_end_of(scheduler.pid)


def check_killed_scheduler(*options: str) -> None:
    with decoding(*options) as (scheduler, ranks):
        assert set(ranks) <= processes_of(scheduler.pid)
        scheduler.kill()
        scheduler.wait(60)
        wait_for_the_end_of(scheduler.pid)


def test_a_killed_rank_ends_the_others_and_the_scheduler_with_an_error_that_names_it() -> None:
    check_killed_rank(*SIMULATED)


def test_a_killed_scheduler_ends_the_ranks() -> None:
    check_killed_scheduler(*SIMULATED)


# the parts


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports modules of the example. No process of a rank is left at the end."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield import_module
    assert multiprocessing.active_children() == []


def group_of(ranks: Any, program: str = "", **options: Any) -> Any:
    """Two simulated ranks; `program` is what they run, of `rank_programs`."""
    serve = {"serve": getattr(ranks("rank_programs"), program)} if program else {}
    return ranks("rank_processes.group").RankGroup(
        2, ranks("paged_decode.model").SMALL, simulated=True, **serve, **options
    )


def step_of(ranks: Any) -> Any:
    step = ranks("paged_decode.model").Step.padding(1, 20, 6)
    step.put(0, np.random.default_rng(0).integers(256, size=20).tolist(), 0, [4, 2])
    return step


def store(group: Any, index: kvoffload.CacheIndex, keys: list[bytes]) -> Any:
    reservation = index.reserve(keys)

    def settle(well: bool) -> None:
        (reservation.commit if well else reservation.abort)()

    return group.submit("store", range(1, 1 + len(reservation.keys)), reservation.slots(), settle)


KEYS = [bytes([number]) * 16 for number in range(4)]


def test_two_ranks_compute_what_one_process_does_but_for_rounding(ranks: Any) -> None:
    model, arrays = ranks("paged_decode.model"), ranks("paged_decode.arrays")
    step = step_of(ranks)
    whole = arrays.ArrayModel(np, model.SMALL, "float32")
    expected = whole.logits(np.zeros(model.SMALL.cache_shape(8), "float32"), step, lambda _: None)
    with group_of(ranks) as group:
        group.open(8, 4)
        logits = group.compute(step)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    assert [process.exitcode for process in group.processes] == [0, 0]


def test_a_store_that_fails_in_one_rank_aborts_its_keys_in_all(ranks: Any) -> None:
    index = kvoffload.CacheIndex(len(KEYS))
    with group_of(ranks, "fails_first_transfer") as group:
        group.open(8, len(KEYS))
        failed = store(group, index, KEYS)
        group.wait(failed)
        assert set(failed.errors) == {1}
        with pytest.raises(kvoffload.TransferError, match=r"^store 1 failed in rank 1: .*cuMemcpyBatchAsync"):
            failed.check()
        assert (index.lookup(KEYS), len(index), group.blocks["store"]) == (0, 0, 0)
        again = store(group, index, KEYS)  # all slots are free again
        group.wait(again)
        again.check()
        assert (index.lookup(KEYS), group.blocks["store"]) == (len(KEYS), len(KEYS))
        index.check()


def test_a_load_that_fails_in_one_rank_is_an_error_and_its_slots_are_unpinned(ranks: Any) -> None:
    index = kvoffload.CacheIndex(len(KEYS))
    with group_of(ranks, "fails_second_transfer") as group:
        group.open(8, len(KEYS))
        group.wait(store(group, index, KEYS))
        lease = index.acquire(KEYS)
        load = group.submit("load", [5, 6, 7, 1], lease.slots(), lambda _: lease.release())
        group.follow(load)
        assert group.compute(step_of(ranks)).shape == (1, 256)  # the ranks go on
        group.wait(load)
        with pytest.raises(kvoffload.TransferError, match=r"^load 2 failed in rank 1: "):
            load.check()
        assert (index.statistics().pinned, index.lookup(KEYS)) == (0, len(KEYS))


def test_a_transfer_that_ranks_refuse_has_failed_in_all(ranks: Any) -> None:
    with group_of(ranks) as group:
        group.open(8, 4)
        ends: list[bool] = []
        refused = group.submit("store", [99], [0], ends.append)
        group.wait(refused)
        assert (set(refused.errors), ends) == ({0, 1}, [False])
        assert "99" in refused.errors[0]


@pytest.mark.parametrize("errors", [(None, None), ("lost", None), (None, "lost")])
def test_a_transfer_is_settled_by_the_end_in_the_last_rank(ranks: Any, errors: tuple[str | None, str | None]) -> None:
    messages = ranks("rank_processes.messages")
    index = kvoffload.CacheIndex(1)
    reservation = index.reserve(KEYS[:1])
    offload = ranks("rank_processes.offload")
    request = messages.Transfer(1, "store", [3], [0])
    transfer = ranks("rank_processes.group").GroupTransfer(request, 2, lambda well: offload.settle(reservation, well))
    transfer.end_in(1, errors[1])
    assert (index.lookup(KEYS[:1]), index.statistics().pending) == (0, 1), "rank 0 may still write its slot"
    transfer.end_in(0, errors[0])
    well = errors == (None, None)
    assert (index.lookup(KEYS[:1]), index.statistics().pending) == (int(well), 0)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("is_killed", r"rank 1 \(process \d+\) was killed by SIGKILL; the other ranks are ended"),
        ("raises", r"(?s)rank 1 \(process \d+\) raised an exception:\nTraceback .*ZeroDivisionError: in the model"),
        ("has_other_logits", "rank 1 has other logits than rank 0"),
    ],
)
def test_a_rank_that_goes_wrong_in_a_step_is_named(ranks: Any, program: str, message: str) -> None:
    with group_of(ranks, program) as group:
        group.open(8, 4)
        with pytest.raises(ranks("rank_processes.group").RankError, match=message):
            group.compute(step_of(ranks))
    assert not any(Path(f"/proc/{process.pid}").exists() for process in group.processes), "no process, and no zombie"


def test_a_rank_that_raised_before_a_message_was_sent_to_it_is_named_with_its_exception(ranks: Any) -> None:
    message = r"(?s)rank 1 \(process \d+\) raised an exception:\nTraceback .*ZeroDivisionError: before any message"
    error = pytest.raises(ranks("rank_processes.group").RankError, match=message)
    with group_of(ranks, "raises_at_once") as group, error:
        group.processes[1].join(60)
        group.open(8, 4)


def test_ranks_whose_blocks_mean_something_else_are_refused(ranks: Any) -> None:
    message = r"rank 1 has KVLayout.* of int32, rank 0 has KVLayout.* of float32: give all ranks the same"
    error = pytest.raises(ranks("rank_processes.group").RankError, match=message)
    with group_of(ranks, "has_another_layout") as group, error:
        group.open(8, 4)


def test_a_rank_that_does_not_answer_is_named(ranks: Any) -> None:
    with group_of(ranks, "does_not_answer", answer_seconds=2.0) as group:
        message = r"no answer of .*rank 1 \(process \d+\) for 2 seconds"
        with pytest.raises(ranks("rank_processes.group").RankError, match=message):
            group.open(8, 4)


# on two GPUs


@pytest.fixture
def two_gpus() -> None:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed")
    for index in range(2):
        try:
            kvoffload.open_device(index, backend="cuda").close()
        except (kvoffload.KVOffloadError, ValueError) as error:
            pytest.skip(f"needs two GPUs: {str(error).split(';')[0]}")


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("size", ["--small", None])
def test_two_gpus_are_bitwise_equal(size: str | None) -> None:
    check_ranks(run(NAME, *([size] if size else []), warnings="default"))
    said = verdicts(run(NAME, *([size] if size else []), "--corrupt", exit_code=1, warnings="default"))
    assert said[PREFETCHED] == "DIFFERENT"


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("two_gpus")
def test_processes_killed_on_two_gpus_leave_nothing() -> None:
    check_killed_rank("--small")
    check_killed_scheduler("--small")
    check_ranks(run(NAME, "--small", warnings="default"))  # both GPUs are usable, and memory can be pinned
