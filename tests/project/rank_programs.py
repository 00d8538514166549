"""What ranks' processes run in tests: as in the example, but for what goes wrong in rank 1.

`examples` must be on the path: a rank's process inherits the path of the process that starts it.
"""

from __future__ import annotations

import os
import signal
from multiprocessing.connection import Connection
from typing import Any

from rank_processes import messages
from rank_processes.rank import Setup, open_rank, serve

import kvoffload

FAILING_CALL = "cuMemcpyBatchAsync"  # carries every transfer of blocks that are one range


def fails_first_transfer(connection: Connection, setup: Setup) -> None:
    """The first transfer fails in rank 1."""
    with open_rank(connection, setup) as rank:
        if setup.rank == 1:
            rank.device.simulator.faults.fail_call(FAILING_CALL)
        rank.run()


def fails_second_transfer(connection: Connection, setup: Setup) -> None:
    """The second transfer fails in rank 1."""
    with open_rank(connection, setup) as rank:
        if setup.rank == 1:
            rank.device.simulator.faults.fail_call(FAILING_CALL, nth=2)
        rank.run()


class _Altered:
    """The pipe of rank 1: its messages to the scheduler go through `alter`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def send(self, answer: Any) -> None:
        self._connection.send(self.alter(answer))

    def alter(self, answer: Any) -> Any:
        raise NotImplementedError


class _KilledAtProduct(_Altered):
    """The process is killed in the middle of a step: when its fourth product is due."""

    products = 0

    def alter(self, answer: Any) -> Any:
        self.products += isinstance(answer, messages.Product)
        if self.products == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


class _OtherLogits(_Altered):
    def alter(self, answer: Any) -> Any:
        return messages.Logits(answer.values + 1) if isinstance(answer, messages.Logits) else answer


class _RaisesAtLogits(_Altered):
    def alter(self, answer: Any) -> Any:
        if isinstance(answer, messages.Logits):
            raise ZeroDivisionError("in the model")
        return answer


class _OtherLayout(_Altered):
    def alter(self, answer: Any) -> Any:
        if not isinstance(answer, messages.Opened):
            return answer
        options: dict[str, Any] = {name: getattr(answer.layout, name) for name in ("tokens_per_block", "block_axes")}
        groups = [group.planes for group in answer.layout.groups]
        return messages.Opened(kvoffload.KVLayout(groups, dtype="int32", **options))


def is_killed(connection: Connection, setup: Setup) -> None:
    serve(_KilledAtProduct(connection) if setup.rank == 1 else connection, setup)  # type: ignore[arg-type]


def has_other_logits(connection: Connection, setup: Setup) -> None:
    serve(_OtherLogits(connection) if setup.rank == 1 else connection, setup)  # type: ignore[arg-type]


def raises(connection: Connection, setup: Setup) -> None:
    serve(_RaisesAtLogits(connection) if setup.rank == 1 else connection, setup)  # type: ignore[arg-type]


def has_another_layout(connection: Connection, setup: Setup) -> None:
    serve(_OtherLayout(connection) if setup.rank == 1 else connection, setup)  # type: ignore[arg-type]


def raises_at_once(connection: Connection, setup: Setup) -> None:
    with open_rank(connection, setup) as rank:
        if setup.rank == 1:
            raise ZeroDivisionError("before any message")
        rank.run()


def does_not_answer(connection: Connection, setup: Setup) -> None:
    """Rank 1 reads all messages, and answers none, until the pipe is closed."""
    if setup.rank != 1:
        serve(connection, setup)
        return
    try:
        while True:
            connection.recv()
    except EOFError:
        pass
