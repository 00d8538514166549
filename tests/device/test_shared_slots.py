"""Slots in memory that processes share: handed over by name, and gone with the last process that maps them."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import run_program

import kvoffload
from kvoffload import CapacityError
from kvoffload.device import shared_slots
from kvoffload.device.shared_slots import SharedSlots

PAGE = 4096

OFFERING = """
    import sys
    from kvoffload.device.shared_slots import SharedSlots
    slots = SharedSlots(4, 4096)
    slots.array[:] = [[number] * 4096 for number in range(1, 5)]
    slots.offer(sys.argv[1], note="rank 0")
    print("offered", flush=True)
    sys.stdin.readline()
    print(int(slots.array[2, 7]), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name} {os.getpid()}"


@pytest.fixture
def offering(name: str) -> Iterator[subprocess.Popen[str]]:
    """A process that offers slots, and says what is in one of them when it gets a line."""
    environment = {**os.environ, "PYTHONPATH": str(Path(kvoffload.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OFFERING), name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "offered\n"
    yield process
    process.kill()
    process.communicate()


def test_two_processes_write_the_same_bytes(name: str, offering: subprocess.Popen[str]) -> None:
    with SharedSlots.receive(name) as slots:
        assert slots.note == "rank 0"
        assert slots.array.shape == (4, PAGE)
        assert slots.array.tolist() == [[number] * PAGE for number in range(1, 5)]
        slots.array[2, 7] = 77
        assert offering.stdin is not None
        assert offering.stdout is not None
        offering.stdin.write("\n")
        offering.stdin.flush()
        assert offering.stdout.readline() == "77\n"


def test_a_killed_process_leaves_no_offer_and_no_file(name: str, offering: subprocess.Popen[str]) -> None:
    before = set(os.listdir("/dev/shm"))
    slots = SharedSlots.receive(name)
    offering.send_signal(signal.SIGKILL)
    offering.wait(30)
    assert slots.array[3, 0] == 4, "it is mapped here"
    with pytest.raises(TimeoutError, match="no process of this machine offers"):
        SharedSlots.receive(name, timeout=0.05)
    assert set(os.listdir("/dev/shm")) <= before
    slots.close()


def test_an_offer_is_waited_for(name: str) -> None:
    with SharedSlots(1, PAGE) as slots:
        timer = threading.Timer(0.1, lambda: slots.offer(name, note="late"))
        timer.start()
        with SharedSlots.receive(name, timeout=20) as received:
            assert received.note == "late"
        timer.join()


def test_several_may_ask_and_a_closed_offer_is_none(name: str) -> None:
    slots = SharedSlots(2, PAGE)
    slots.offer(name)
    received = [SharedSlots.receive(name) for _ in range(3)]
    slots.close()
    slots.close()
    with pytest.raises(TimeoutError):
        SharedSlots.receive(name)
    received[0].array[1, 1] = 9
    assert [each.array[1, 1] for each in (*received, slots)] == [9] * 4, "closed, they stay mapped"
    for each in received:
        each.close()
    with SharedSlots(2, PAGE) as others:
        others.offer(name)


def test_nothing_stays_open(name: str) -> None:
    before = (set(os.listdir("/proc/self/fd")), threading.active_count())
    for _ in range(3):
        with SharedSlots(2, PAGE) as slots:
            slots.offer(name)
            SharedSlots.receive(name).close()
        del slots
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_what_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="num_slots"):
        SharedSlots(0, PAGE)
    with pytest.raises(ValueError, match="multiple of 4096"):
        SharedSlots(1, 100)
    with pytest.raises(CapacityError, match="give fewer slots"):
        SharedSlots(1 << 40, PAGE)
    with SharedSlots(1, PAGE) as slots, SharedSlots(1, PAGE) as others:
        with pytest.raises(ValueError, match="note must have"):
            slots.offer(name, note="x" * 40_000)
        slots.offer(name)
        with pytest.raises(ValueError, match="is offered already"):
            others.offer(name)
        with pytest.raises(ValueError, match="an offer has been made"):
            slots.offer(name)


def test_a_limit_on_the_address_space_is_a_capacity_error() -> None:
    said = run_program(
        """
        import resource
        from kvoffload import CapacityError
        from kvoffload.device.shared_slots import SharedSlots
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20),) * 2)
        try:
            SharedSlots(1 << 14, 4096)
        except CapacityError as error:
            print(error)
        """
    )
    assert "16384 slots of 4096 bytes cannot be mapped ([Errno 12]" in said
    assert "give fewer, or raise ulimit -v" in said


def test_an_offer_that_answers_nobody_is_not_waited_for_for_ever(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many wait as it keeps waiting; each further call would wait until one of them is answered."""
    monkeypatch.setattr(shared_slots, "ANSWER_SECONDS", 0.1)
    waiting: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(shared_slots._address(name))
        silent.listen(0)
        with pytest.raises(TimeoutError):
            SharedSlots.receive(name)
        try:
            for _ in range(3):
                waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                waiting[-1].setblocking(False)
                waiting[-1].connect(shared_slots._address(name))
        except BlockingIOError:
            pass
        with pytest.raises(TimeoutError, match="answers nobody"):
            SharedSlots.receive(name, timeout=60.0)
        for each in waiting:
            each.close()


def test_an_offer_outlasts_a_moment_without_descriptors(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_slots, "FAILURE_SECONDS", 0.01)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with SharedSlots(2, PAGE) as slots:
        last = os.dup(0)
        os.close(last)
        resource.setrlimit(resource.RLIMIT_NOFILE, (last + 1, hard))  # for the offer itself, and no connection
        try:
            slots.offer(name)
            end = time.monotonic() + 10
            while "are not handed over now" not in caplog.text:
                assert time.monotonic() < end, "it has accepted something"
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        slots.array[:] = 7
        with SharedSlots.receive(name) as received:
            assert (received.array == 7).all()


@pytest.mark.filterwarnings("ignore:.*fork")  # of JAX, where another test of this process has loaded it
def test_a_forked_child_neither_keeps_a_name_nor_ends_the_offer(name: str) -> None:
    (read, write), (ready, say) = os.pipe(), os.pipe()
    with SharedSlots(2, PAGE) as slots:
        slots.offer(name)
        child = os.fork()
        if child == 0:
            os.close(write)
            slots.close()
            os.write(say, b"x")
            os.read(read, 1)  # until the parent has seen all, or has ended
            os._exit(0)
        try:
            os.read(ready, 1)
            SharedSlots.receive(name).close()
            slots.close()
            with SharedSlots(1, PAGE) as others:
                others.offer(name)
        finally:
            for each in (write, read, ready, say):
                os.close(each)
            os.waitpid(child, 0)
