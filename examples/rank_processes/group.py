"""The scheduler's side: starts the ranks' processes, talks over pipes, and sees when a transfer has ended.

A transfer has ended when it has ended in every rank, and failed if it failed in one. If a rank dies, raises or does not
answer, the scheduler gets an error that names it; `close` then ends the others.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from paged_decode import model

import kvoffload
from rank_processes import messages
from rank_processes import rank as rank_module

ANSWER_SECONDS = 120.0  # the first step compiles kernels
END_SECONDS = 10.0  # for a rank to drain and unpin after its pipe was closed


class RankError(Exception):
    """A rank died, raised an exception, did not answer, or computed other logits than the others."""


class GroupTransfer:
    """The same transfer in all ranks.

    Attributes:
        missing: ranks in which it has not ended.
        errors: why it failed, by rank.
    """

    def __init__(self, request: messages.Transfer, ranks: int, settle: Callable[[bool], None]) -> None:
        self.number, self.direction, self.num_blocks = request.number, request.direction, len(request.blocks)
        self.missing = set(range(ranks))
        self.errors: dict[int, str] = {}
        self._settle = settle

    def end_in(self, rank: int, error: str | None) -> None:
        """Note that it has ended in one rank. The last rank settles it."""
        self.missing.remove(rank)
        if error is not None:
            self.errors[rank] = error
        if not self.missing:
            self._settle(not self.errors)

    def check(self) -> None:
        """Raise TransferError if it has failed in any rank."""
        if self.errors:
            texts = (f"in rank {rank}: {error}" for rank, error in sorted(self.errors.items()))
            raise kvoffload.TransferError(f"{self.direction} {self.number} failed {'; '.join(texts)}")


class RankGroup:
    """Processes of ranks, started by spawn: a rank inherits no memory, no file and no CUDA context of the scheduler.

    A context manager; used by one thread.

    Args:
        ranks: how many.
        size: the whole model's size.
        simulated: see `rank.Setup`.
        serve: the function that a rank's process runs; tests pass their own.
        answer_seconds: how long a rank may take for any answer.

    Attributes:
        processes: the ranks' processes.
        blocks: stored and loaded so far, by all ranks.
    """

    def __init__(
        self,
        ranks: int,
        size: model.ModelSize,
        *,
        simulated: bool,
        serve: Callable[[Connection, rank_module.Setup], None] = rank_module.serve,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._answer_seconds = answer_seconds
        self.processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._transfers: dict[int, GroupTransfer] = {}  # only those that have not ended
        self._submitted = 0
        self.blocks = {"store": 0, "load": 0}
        context = get_context("spawn")
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                self._connections.append(ours)
                setup = rank_module.Setup(rank, ranks, size, simulated)
                process = context.Process(target=serve, args=(theirs, setup), name=f"rank {rank}", daemon=True)
                process.start()
                self.processes.append(process)
                theirs.close()  # or the pipe would stay open when the rank dies
        except BaseException:
            self.close()
            raise

    # what the scheduler asks for ----------------------------------------------------------------------------------

    def open(self, num_blocks: int, num_slots: int) -> kvoffload.KVLayout:
        """Let every rank make a cache and an engine. Returns the layout of rank 0's cache, for keys.

        Raises:
            RankError: the layouts have different fingerprints, so the ranks' blocks do not mean the same.
        """
        self._send(messages.Open(num_blocks, num_slots))
        layouts: list[kvoffload.KVLayout] = [answer.layout for answer in self._gather(messages.Opened)]
        for rank, layout in enumerate(layouts):
            if layout.fingerprint != layouts[0].fingerprint:
                mine, other = (f"{each} of {each.dtype}" for each in (layout, layouts[0]))
                raise RankError(f"rank {rank} has {mine}, rank 0 has {other}: give all ranks the same")
        return layouts[0]

    def submit(
        self,
        direction: Literal["store", "load"],
        blocks: Iterable[int],
        slots: Iterable[int],
        settle: Callable[[bool], None],
    ) -> GroupTransfer:
        """Submit the same transfer in every rank, after the steps so far. Returns at once.

        Args:
            settle: called once, when the transfer has ended in all ranks; True if it has succeeded in all.
        """
        self._submitted += 1
        request = messages.Transfer(self._submitted, direction, list(map(int, blocks)), list(map(int, slots)))
        transfer = GroupTransfer(request, len(self.processes), settle)
        self._transfers[request.number] = transfer
        self._send(request)
        return transfer

    def follow(self, transfer: GroupTransfer) -> None:
        """Make all steps from now on follow a transfer, in every rank."""
        if transfer.missing:
            self._send(messages.Follow(transfer.number))

    def compute(self, step: model.Step) -> messages.Floats:
        """Compute a step in all ranks together. Returns the logits."""
        self._send(messages.Compute(step))
        while True:
            answers = self._gather(messages.Product, messages.Logits)
            if isinstance(answers[0], messages.Logits):
                break
            self._send(messages.Sum(sum((each.values for each in answers[1:]), answers[0].values)))
        first: messages.Floats = answers[0].values
        for rank, each in enumerate(answers):
            if each.values.tobytes() != first.tobytes():
                raise RankError(f"rank {rank} has other logits than rank 0: weights or sums differ")
        return first

    def wait(self, transfer: GroupTransfer) -> None:
        """Wait until a transfer has ended in all ranks, even if it failed."""
        deadline = time.monotonic() + self._answer_seconds
        while transfer.missing:
            self._take_one(deadline, transfer.missing)

    def drain(self) -> None:
        """Wait for all transfers."""
        for transfer in list(self._transfers.values()):
            self.wait(transfer)

    def spoil(self, rank: int, slot: int) -> None:
        """Change bits in a slot of one rank, to test the comparison."""
        self._send_to(rank, messages.Spoil(slot))

    def close(self) -> None:
        """Close the pipes, which ends the ranks. Kill a rank that has not ended after END_SECONDS. Idempotent."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + END_SECONDS
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # messages -----------------------------------------------------------------------------------------------------

    def _send(self, request: messages.Request) -> None:
        for rank in range(len(self.processes)):
            self._send_to(rank, request)

    def _send_to(self, rank: int, request: messages.Request) -> None:
        try:
            self._connections[rank].send(request)
        except OSError:
            raise self._dead(rank) from None

    def _gather(self, *kinds: type) -> list[Any]:
        """The next answer of every rank, all of the same one of these kinds. Notes transfers that end meanwhile."""
        deadline = time.monotonic() + self._answer_seconds
        answers: dict[int, Any] = {}
        while len(answers) < len(self.processes):
            missing = set(range(len(self.processes))) - set(answers)
            taken = self._take_one(deadline, missing)
            if taken is not None:
                rank, answer = taken
                assert isinstance(answer, kinds), answer
                answers[rank] = answer
        gathered = [answers[rank] for rank in sorted(answers)]
        assert len(set(map(type, gathered))) == 1, gathered
        return gathered

    def _take_one(self, deadline: float, missing: Iterable[int]) -> tuple[int, messages.Answer] | None:
        """Wait for the next message of any rank. Returns it, or None if it was the end of a transfer.

        Args:
            missing: the ranks to name if the deadline passes.
        """
        ready = wait(self._connections, max(0.0, deadline - time.monotonic()))
        if not ready:
            names = ", ".join(map(self._name, sorted(missing)))
            raise RankError(f"no answer of {names} for {self._answer_seconds:g} seconds")
        rank = min(self._connections.index(each) for each in ready if isinstance(each, Connection))
        try:
            answer: messages.Answer = self._connections[rank].recv()
        except (EOFError, OSError):
            raise self._dead(rank) from None
        if isinstance(answer, messages.Raised):
            raise self._raised(rank, answer)
        if not isinstance(answer, messages.Ended):
            return rank, answer
        transfer = self._transfers[answer.number]
        transfer.end_in(rank, answer.error)
        if not transfer.missing:
            del self._transfers[answer.number]
            self.blocks[transfer.direction] += 0 if transfer.errors else transfer.num_blocks
        return None

    def _raised(self, rank: int, answer: messages.Raised) -> RankError:
        return RankError(f"{self._name(rank)} raised an exception:\n{answer.text}")

    def _dead(self, rank: int) -> RankError:
        """Why a rank's pipe is closed: its last message says so, or its exit code."""
        try:
            while self._connections[rank].poll():
                answer: messages.Answer = self._connections[rank].recv()
                if isinstance(answer, messages.Raised):
                    return self._raised(rank, answer)
        except (EOFError, OSError):
            pass
        process = self.processes[rank]
        process.join(END_SECONDS)
        code = process.exitcode
        if code is None:
            return RankError(f"{self._name(rank)} has closed its pipe")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
        return RankError(f"{self._name(rank)} {how}; the other ranks are ended")

    def _name(self, rank: int) -> str:
        return f"rank {rank} (process {self.processes[rank].pid})"
