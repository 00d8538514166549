"""What ranks' processes run in tests: as in the example, but for what goes wrong in rank 1.

`examples` must be on the path: a rank's process inherits the path of the process that starts it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from rank_processes import messages
from rank_processes.rank import Setup, open_rank, serve

import kvoffload

FAILING_CALL = "cuMemcpyBatchAsync"  # carries every transfer of blocks that are one range


def _fail_transfer(nth: int, connection: Connection, setup: Setup) -> None:
    """A transfer fails in rank 1."""
    with open_rank(connection, setup) as rank:
        if setup.rank == 1:
            rank.device.simulator.faults.fail_call(FAILING_CALL, nth=nth)
        rank.run()


fails_first_transfer, fails_second_transfer = partial(_fail_transfer, 1), partial(_fail_transfer, 2)


class _Altered:
    """The pipe of rank 1: its messages to the scheduler go through `alter`."""

    def __init__(self, connection: Connection, alter: Callable[[Any], Any]) -> None:
        self._connection, self._alter = connection, alter

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def send(self, answer: Any) -> None:
        self._connection.send(self._alter(answer))


def _serve_altered(alter: Callable[[Any], Any], connection: Connection, setup: Setup) -> None:
    serve(_Altered(connection, alter) if setup.rank == 1 else connection, setup)  # type: ignore[arg-type]


_products = count(1)


def _kill_at_product(answer: Any) -> Any:
    """The process is killed in the middle of a step: when its fourth product is due."""
    if isinstance(answer, messages.Product) and next(_products) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer


def _change_logits(answer: Any) -> Any:
    return messages.Logits(answer.values + 1) if isinstance(answer, messages.Logits) else answer


def _raise_at_logits(answer: Any) -> Any:
    if isinstance(answer, messages.Logits):
        raise ZeroDivisionError("in the model")
    return answer


def _change_layout(answer: Any) -> Any:
    if not isinstance(answer, messages.Opened):
        return answer
    options: dict[str, Any] = {name: getattr(answer.layout, name) for name in ("tokens_per_block", "block_axes")}
    groups = [group.planes for group in answer.layout.groups]
    return messages.Opened(kvoffload.KVLayout(groups, dtype="int32", **options))


is_killed, has_other_logits = partial(_serve_altered, _kill_at_product), partial(_serve_altered, _change_logits)
raises, has_another_layout = partial(_serve_altered, _raise_at_logits), partial(_serve_altered, _change_layout)


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
