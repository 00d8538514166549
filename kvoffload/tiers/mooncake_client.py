"""Mooncake's client: its import, the environment variables that configure it, and the addresses that it is given."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import Any, Literal

from kvoffload.errors import CapabilityError
from kvoffload.internal.checks import at_least, shown

Protocol = Literal["tcp", "rdma"]

_SET_UP = """
import json, os, sys
setup, sys.path[:] = json.load(sys.stdin)
from mooncake import store
client = store.MooncakeDistributedStore()
os._exit(client.setup(setup) != 0)  # `close` would take a second
"""


def import_store() -> Any:
    """The module mooncake.store; CapabilityError with a remedy if it cannot be imported."""
    try:
        from mooncake import store
    except ImportError as error:
        remedy = "pip install 'kvoffload[mooncake]'"
        if ".so" in str(error):
            remedy = "install the library, as by `apt-get install libibverbs1 libnuma1 libcurl4`"
        raise CapabilityError(
            f"MooncakeTier needs the package mooncake-transfer-engine-non-cuda, which cannot be imported ({error}); "
            f"{remedy}"
        ) from error
    return store


def client_version() -> str:
    """Of the installed package; "unknown" if it has no metadata."""
    from importlib.metadata import PackageNotFoundError, version

    for name in ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def set_environment(milliseconds: int) -> None:
    """Set what configures clients that are made from here on, and all transfers, unless the user has set it.

    Args:
        milliseconds: that a request or a transfer without progress may take; for transfers in whole seconds.
    """
    seconds = max(1, round(milliseconds / 1000))
    by_user = _variables_of_user()
    if "MC_LOG_LEVEL" not in by_user:
        os.environ["MC_LOG_LEVEL"] = "ERROR"  # else a dozen lines on stderr for each client
    if "MC_STORE_CLIENT_SETUP_RETRIES" not in by_user:
        os.environ["MC_STORE_CLIENT_SETUP_RETRIES"] = "1"  # else `setup` tries for 90 seconds
    if "MC_RPC_TIMEOUT_MS" not in by_user:
        os.environ["MC_RPC_TIMEOUT_MS"] = str(milliseconds)
    if "MC_RPC_CONNECT_TIMEOUT_MS" not in by_user:
        os.environ["MC_RPC_CONNECT_TIMEOUT_MS"] = str(milliseconds)
    if "MC_TCP_PROGRESS_TIMEOUT_SEC" not in by_user:
        os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] = str(seconds)
    if "MC_TCP_STATUS_TIMEOUT_SEC" not in by_user:
        os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] = str(seconds)


@cache
def _variables_of_user() -> frozenset[str]:
    """Those that are set when the first tier is made."""
    return frozenset(os.environ)


def replication(store: Any, replicas: int, soft_pin: float | None) -> Any:
    """How records are kept: what every put is given. ValueError if an argument is out of range."""
    config = store.ReplicateConfig()
    config.replica_num = at_least("replicas", replicas, 1)
    if soft_pin is not None:
        config.soft_pin_action = store.SoftPinAction.ENABLE
        config.soft_pin_ttl_ms = at_least("soft_pin, in milliseconds,", round(1000 * soft_pin), 1)
    return config


def checked_protocol(protocol: Protocol | None) -> Protocol:
    """The protocol to use.

    Raises:
        ValueError: it is none.
        CapabilityError: "rdma", and no port of a device is active.
    """
    if protocol not in (None, "tcp", "rdma"):
        raise ValueError(f'protocol must be "tcp", "rdma" or None, got {shown(protocol)}')
    if protocol == "tcp":
        return protocol
    active = any("ACTIVE" in state.read_text() for state in Path("/sys/class/infiniband").glob("*/ports/*/state"))
    if protocol == "rdma" and not active:  # Mooncake's client would be set up, and its transfers fail
        raise CapabilityError('protocol="rdma" needs a device with an active port in /sys/class/infiniband; use "tcp"')
    return "rdma" if active else "tcp"


def default_threads(protocol: Protocol) -> int:
    """How many threads are to call the client.

    More of them verify records while others are carried. But over TCP a call polls: on 2 CPUs, 16 MiB each way took
    19 ms of CPU by bare calls, 24 with one thread, 32 with two and 47 with four, and one thread was the fastest. On 16
    CPUs, 8 records of 2 MiB at a time, gets of 2 and 4 threads had 0.84 and 1.00 of the bandwidth of bare calls.
    """
    return 4 if protocol == "rdma" or len(os.sched_getaffinity(0)) >= 8 else 1


def addresses(master: str) -> list[tuple[str, int]]:
    """Host and port of a master, or of each server where masters register; ValueError if it is no such string."""
    found: list[tuple[str, int]] = []
    for address in (master.rpartition("://")[2] if isinstance(master, str) else "").split(";"):
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f'master must be "host:port", such as "127.0.0.1:50051", got {shown(master)}')
        found.append((host.strip("[]"), int(port)))
    return found


def accepts(address: tuple[str, int], timeout: float) -> bool:
    """Whether a TCP connection is made within `timeout` seconds, without the interpreter's lock."""
    try:
        socket.create_connection(address, timeout).close()
    except OSError:
        return False
    return True


def can_set_up(setup: Mapping[str, str], timeout: float) -> bool:
    """Whether a client can be set up as `setup` says, tried in a child process for at most `timeout` seconds.

    `setup` of the client holds the interpreter's lock until the master has answered, or its own time is over: with a
    silent master no thread of this process would run meanwhile. The child contributes no memory to the store.
    """
    given = json.dumps([{**setup, "global_segment_size": "0"}, sys.path])
    child = [get_executable(), "-c", _SET_UP]
    try:
        return subprocess.run(child, input=given, text=True, timeout=timeout, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def own_address(remote: tuple[str, int]) -> str:
    """Of this machine, as another one sees it; no packet is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(*remote, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
