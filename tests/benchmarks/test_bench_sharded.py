"""`bench sharded`: bytes on several devices and in processes of their own; wrong bytes are counted; no times here."""

from __future__ import annotations

import time
from multiprocessing import Pipe
from threading import Thread

import pytest
from benching import run_json, times_in

import kvoffload
from kvoffload.commands import main
from kvoffload.internal.models import find_model
from kvoffload.planning.transfer_plan import Direction
from kvoffload.terminal.console import CommandError
from kvoffload.testing import SimulatedDriver, check_clean_close
from kvoffload_bench import sharded
from kvoffload_bench.series import DIRECTIONS
from kvoffload_bench.sharded import ONE, SHARDED, Processes, Series, ShardSize, size_of

SIZE = ShardSize(3, 64, 2, 3)
BOTH = tuple(Direction)


def test_every_direction_is_verified_and_without_times(capsys: pytest.CaptureFixture[str]) -> None:
    fields = run_json(capsys, "bench", "sharded", "--backend", "simulated", "--gpus", "3")
    assert [each["direction"] for each in fields["series"]] == list(DIRECTIONS)
    assert all(each["wrong"] == {ONE: 0, SHARDED: 0} for each in fields["series"])
    assert (fields["gpus"], fields["wrong_rows"]) == (3, 0)
    assert times_in(fields) == []


def test_the_table_says_that_times_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sharded", "--backend", "simulated"]) == 0
    out = capsys.readouterr().out
    assert "times need a GPU" in out
    assert "GB/s" not in out


def test_a_transfer_is_of_64_mib() -> None:
    assert size_of(find_model("llama-3.1-8b")) == (64, 32768, 32, 8)


@pytest.mark.parametrize("directions", DIRECTIONS.values(), ids=DIRECTIONS)
def test_what_is_not_copied_is_counted(directions: tuple[Direction, ...], seed: int) -> None:
    driver = SimulatedDriver(device_count=2, seed=seed)
    devices = [kvoffload.open_device(index, backend=driver) for index in range(2)]
    with Series(devices, SIZE, seed, sharded=True) as series:
        assert series.nbytes == 2 * SIZE.nbytes == 2 * 6 * 3 * 64
        series.poison(directions)
        assert series.wrong(directions) == 2 * SIZE.in_series * len(directions)
        begin, end = series.execute(directions)
        assert begin <= end
        assert series.wrong(directions) == 0
    devices[1].close()
    check_clean_close(devices[0])


def test_processes_answer_for_all(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The main function of a process, in threads, each on a simulated device of its own."""
    monkeypatch.setattr(
        sharded, "open_device", lambda index: kvoffload.open_device(backend=SimulatedDriver(seed=seed + index))
    )
    pipes = [Pipe() for _ in range(2)]
    threads = [
        Thread(target=sharded._serve, args=(theirs, index, SIZE, seed)) for index, (_, theirs) in enumerate(pipes)
    ]
    for thread in threads:
        thread.start()
    connections = [mine for mine, _ in pipes]
    for connection in connections:
        assert sharded._answer(connection, 30) is None
    movers = Processes(connections, SIZE)
    movers.poison(BOTH)
    assert movers.wrong(BOTH) == 2 * SIZE.in_series * 2
    asked = time.perf_counter()
    begin, end = movers.execute(BOTH)
    assert asked < begin <= end
    assert movers.wrong(BOTH) == 0
    for connection in connections:
        connection.send(None)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_a_process_that_does_not_answer_is_an_error() -> None:
    mine, theirs = Pipe()
    with mine:
        with theirs, pytest.raises(CommandError, match="has not answered for 0 s"):
            sharded._answer(mine, 0.01)
        with pytest.raises(CommandError, match="has ended"):
            sharded._answer(mine, 0.01)
