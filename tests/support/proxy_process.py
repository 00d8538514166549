"""A FaultyProxy in a process of its own, for clients that hold the interpreter's lock while they wait for an answer."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

from faulty_proxy import HOST, FaultyProxy, ProxyFaults


def serve(control: Connection, target: int, seed: int) -> None:
    with FaultyProxy(target, seed) as proxy:
        control.send(proxy.port)
        while (wanted := control.recv()) is not None:
            if isinstance(wanted, ProxyFaults):
                proxy.faults = wanted
            else:
                proxy.cut_all()
            control.send(proxy.counts)


class ProxyProcess:
    """As a `FaultyProxy`, for a `with` block."""

    def __init__(self, target: int, seed: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        self._control, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, target, seed), daemon=True)
        self._process.start()
        self.address = f"{HOST}:{self._control.recv()}"
        self.counts: dict[str, int] = {}
        self._faults = ProxyFaults()

    @property
    def faults(self) -> ProxyFaults:
        return self._faults

    @faults.setter
    def faults(self, faults: ProxyFaults) -> None:
        self._faults = faults
        self._ask(faults)

    def cut_all(self) -> None:
        self._ask("cut all")

    def _ask(self, wanted: object) -> None:
        self._control.send(wanted)
        self.counts = self._control.recv()

    def __enter__(self) -> ProxyProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._control.send(None)
        self._process.join(10)
        assert self._process.exitcode == 0
