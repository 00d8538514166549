"""A Mooncake Store for tests, on loopback: the master and store processes of the installed package."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from servers import HOST, Process, free_ports, missing, wait_until

from kvoffload.errors import CapabilityError
from kvoffload.tiers import MooncakeTier

STORE_BYTES = 64 << 20
HOST_PROGRAM = Path(__file__).with_name("mooncake_host.py")
CLIENT_TTL = 1  # seconds after which a store process that is silent counts as dead


def mooncake_program(name: str) -> str:
    """The path of mooncake_master or mooncake_client."""
    try:
        MooncakeTier(identity="")
    except CapabilityError as error:
        missing(str(error))
    import mooncake.store

    path = Path(mooncake.store.__file__).parent / name
    if not path.exists():
        missing(f"{path} does not exist")
    return str(path)


class MooncakeServers:
    """A master, and processes that contribute memory to it; all end with a `with` block.

    Args:
        store_bytes: that each store process contributes.
        lease: seconds for which a record that was read or asked for is not evicted.
        patience: seconds after which a silent store process counts as dead, and another put may repeat one that has not
            ended.

    Attributes:
        master, stores: the processes, running or not. After a start, call `settle`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        stores: int = 1,
        store_bytes: int = STORE_BYTES,
        lease: float = 10.0,
        patience: int = CLIENT_TTL,
    ) -> None:
        port, self._metrics = free_ports(2)
        self._folder, self._store_bytes, self._wanted = folder, store_bytes, stores
        command = [
            mooncake_program("mooncake_master"), f"--rpc_port={port}", f"--rpc_address={HOST}",
            f"--metrics_port={self._metrics}", f"--metrics_host={HOST}", f"--client_ttl={patience}",
            f"--default_kv_lease_ttl={round(1000 * lease)}", f"--put_start_discard_timeout_sec={patience}",
        ]  # fmt: skip
        self.master = Process(command, port, folder)
        self.stores: list[Process] = []

    def add_store(self) -> Process:
        """Start one more."""
        [port] = free_ports(1)
        command = [
            mooncake_program("mooncake_client"), f"--host={HOST}", f"--port={port}", "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address={self.master.address}", f"--global_segment_size={self._store_bytes}",
        ]  # fmt: skip
        self.stores.append(Process(command, port, self._folder))
        self.stores[-1].start()
        return self.stores[-1]

    def settle(self) -> None:
        """Wait until the master knows the memory of the store processes that run, and of no others."""
        wait_until(lambda: self.known() == sum(each.running for each in self.stores), "the master knows all stores")

    def known(self) -> int:
        """Of how many store processes the master knows the memory; -1 if it does not answer."""
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self._metrics}/get_all_segments", timeout=10) as answer:
                return len(answer.read().split())
        except OSError:
            return -1

    def __enter__(self) -> MooncakeServers:
        try:
            self.master.start()
            for _ in range(self._wanted):
                self.add_store()
            self.settle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.stores, self.master):
            process.kill()


class Host:
    """A process of `mooncake_host`, which ends with a `with` block."""

    def __init__(
        self, servers: MooncakeServers, *, segment_bytes: int = 0, replicas: int = 1, backend: str = "simulated"
    ) -> None:
        arguments = [servers.master.address, "hosts", str(segment_bytes), str(replicas), backend]
        paths = [str(Path(__file__).resolve().parents[2]), *sys.path]
        self._process = subprocess.Popen(
            [sys.executable, str(HOST_PROGRAM), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert self._read() == "ready"

    def ask(self, call: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(call + "\n")
        self._process.stdin.flush()
        return int(self._read())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Settled:
    """A process of these servers that has started when the store is whole again, for `chaos_remote`."""

    def __init__(self, servers: MooncakeServers, process: Process) -> None:
        self._servers, self._process = servers, process
        self.kill, self.pause = process.kill, process.pause

    def start(self) -> None:
        self._process.start()
        self._servers.settle()

    def resume(self) -> None:
        self._process.resume()
        time.sleep(1.5 * CLIENT_TTL)  # by then a pause that was too long has had its effect
        self._servers.settle()
