"""A Mooncake Store on loopback: the master and store processes of the installed wheel, started, killed and ended."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.errors import CapabilityError
from kvoffload.tiers.mooncake import MooncakeTier

SECONDS = 30.0  # that a server may take to start
LEASE = 0.2  # seconds, that a read keeps a record from being evicted
CLIENT_TTL = 2  # seconds after which the master takes a silent store process for dead


def missing_server() -> str | None:
    """Why there is no Mooncake Store to run; None if there is one."""
    try:
        MooncakeTier(identity="")
    except CapabilityError as error:
        return str(error)
    return None if (_programs() / "mooncake_master").exists() else f"no mooncake_master in {_programs()}"


def _programs() -> Path:
    import mooncake.store

    return Path(mooncake.store.__file__).parent


def require_server() -> None:
    """Skip the test without a server; fail it if KVOFFLOAD_SERVERS=required."""
    reason = missing_server()
    if reason is not None:
        if os.environ.get("KVOFFLOAD_SERVERS") == "required":
            pytest.fail(f"KVOFFLOAD_SERVERS=required: {reason}")
        pytest.skip(reason)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class MooncakeServers:
    """A master, which comes back at the same address, and store processes.

    Attributes:
        address: of the master.
        stores: the processes that run, oldest first.
    """

    def __init__(self, store_bytes: int) -> None:
        self.store_bytes = store_bytes
        self.stores: list[subprocess.Popen[bytes]] = []
        self._folder = _programs()
        self._port, self._metrics_port = free_port(), free_port()
        self._master: subprocess.Popen[bytes] | None = None
        self.address = f"127.0.0.1:{self._port}"

    def start_master(self) -> None:
        """Start the master, and wait until it serves."""
        self._master = self._start(
            "mooncake_master",
            f"--rpc_port={self._port}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={self._metrics_port}",
            "--metrics_host=127.0.0.1",
            f"--default_kv_lease_ttl={round(1000 * LEASE)}ms",
            f"--client_ttl={CLIENT_TTL}",
        )
        self.wait_for(lambda: self.ask("health") != "", "the master")

    def start_store(self) -> subprocess.Popen[bytes]:
        """Start a process that contributes memory, and wait until the master knows it."""
        before = self.segments()
        store = self._start(
            "mooncake_client",
            "--host=127.0.0.1",
            f"--port={free_port()}",
            f"--global_segment_size={self.store_bytes}",
            f"--master_server_address={self.address}",
            "--metadata_server=P2PHANDSHAKE",
        )
        self.stores.append(store)
        self.wait_for(lambda: self.segments() > before, "a store process")
        return store

    def kill_master(self) -> None:
        """All that the store held is gone."""
        if self._master is not None:
            self._master.kill()
            self._master.wait()
            self._master = None

    def kill_store(self, store: subprocess.Popen[bytes]) -> None:
        self.stores.remove(store)
        store.kill()
        store.wait()

    def close(self) -> None:
        for store in [*self.stores]:
            self.kill_store(store)
        self.kill_master()

    def segments(self) -> int:
        """Of how many store processes the master knows the memory."""
        return len(self.ask("get_all_segments").split())

    def ask(self, page: str) -> str:
        """A page of the master's; "" if it does not answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/{page}", timeout=SECONDS) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end, f"{what} was not there after {SECONDS} seconds"
            time.sleep(0.01)

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [self._folder / program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


@contextlib.contextmanager
def mooncake_servers(stores: int = 1, store_bytes: int = 64 << 20) -> Iterator[MooncakeServers]:
    """A master with store processes; skips the test where there are none to run."""
    require_server()
    servers = MooncakeServers(store_bytes)
    try:
        servers.start_master()
        for _ in range(stores):
            servers.start_store()
        yield servers
    finally:
        servers.close()
