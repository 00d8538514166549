"""MooncakeTier: records in a Mooncake Store, the memory of several machines, through its client without torch."""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvoffload.cache.tiering.tier import Outcome
from kvoffload.driver import address_of
from kvoffload.errors import CapabilityError
from kvoffload.internal.checks import at_least, masked, seconds, shown
from kvoffload.internal.log import LOGGER
from kvoffload.internal.types import UInt8Array
from kvoffload.tiers.options import Limits, given_or_default, import_package
from kvoffload.tiers.refusals import MOONCAKE_NO_ROOM
from kvoffload.tiers.remote import HEADER_BYTES, Parts, RemoteTier

Protocol = Literal["tcp", "rdma"]
_MOST_REGISTERED = 64 << 30  # bytes, by one call: drivers refuse to register a pool of 512 GiB at once
_STARTING = 10.0  # seconds that a child process may take besides `timeout`, on a busy machine
_STORED = dict.fromkeys(MOONCAKE_NO_ROOM, Outcome.DECLINED) | {0: Outcome.DONE}
# Not found, being written, lease over before the bytes were there, no replica, replica gone.
_MISSES = frozenset({-704, -703, -707, -710, -712})
_NOT_FETCHED = dict.fromkeys(_MISSES, Outcome.MISSING)
_WRONG_SIZE = frozenset({-600, -800})  # among other things

_SET_UP = """
import json, os, sys
setup, sys.path[:] = json.load(sys.stdin)
from mooncake import store
client = store.MooncakeDistributedStore()
os._exit(client.setup(setup) != 0)  # `close` would take a second
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeConnection:
    """How `MooncakeTier` reaches the master and the other machines.

    Attributes:
        metadata_server: the address for Mooncake's transfer engine, the same on all machines; "P2PHANDSHAKE": none. The
            repr leaves it out, as it may contain a password.
        hostname: the name by which other machines reach this one. None: the address from which it reaches the master.
        protocol: "rdma" or "tcp", the same on all machines of a store. None: "rdma" if this machine has an active RDMA
            device, else "tcp".
        devices: names of the RDMA devices to use, separated by commas; "": Mooncake chooses.

    Raises:
        ValueError: `protocol` is another value.
    """

    metadata_server: str = field(default="P2PHANDSHAKE", repr=False)
    hostname: str | None = None
    protocol: Protocol | None = None
    devices: str = ""

    def __post_init__(self) -> None:
        if self.protocol not in (None, "tcp", "rdma"):
            raise ValueError(f'protocol must be "tcp", "rdma" or None, got {shown(self.protocol)}')


class MooncakeTier(RemoteTier):
    """Records in a Mooncake Store: memory that processes on several machines contribute. Its master evicts.

    `attach` registers the pool with Mooncake's client, which copies records between pool and store, several in a call.
    `attach` also tries to connect, first in a child process, because the client holds the interpreter's lock while it
    waits. If no master answers, `attach` logs that and does not raise: keys are FAILED, and each later call tries
    again.

    A restarted master is found again, but its records are gone, unless the masters are set up for high availability.
    Records in the memory of a dead process are FAILED until the master notices, then read from another replica, or
    MISSING. A removal does not wait for readers.

    Unless they are set, the tier sets environment variables of the process that Mooncake's client reads:
    MC_LOG_LEVEL=ERROR, MC_STORE_CLIENT_SETUP_RETRIES=1, and by `timeout` MC_RPC_TIMEOUT_MS, MC_RPC_CONNECT_TIMEOUT_MS,
    MC_TCP_PROGRESS_TIMEOUT_SEC and MC_TCP_STATUS_TIMEOUT_SEC.

    Attributes:
        protocol: "rdma" or "tcp", as chosen by the constructor.

    Args:
        master: "host:port", or the servers where masters in high availability register: "etcd://host:port;host:port".
        identity, prefix, key, name: see `RemoteTier`.
        connection: addresses and protocol; None: `MooncakeConnection()`.
        segment_bytes: bytes of memory that this process contributes. The records in it are lost when the process ends.
        replicas: copies of each record, in different processes; fewer if there is no room.
        soft_pin: for so many seconds a record is evicted only if no other can be. None: no such preference.
        timeout: seconds that a request to the master may take, and that a transfer may stall. A call for several keys
            makes up to three requests and one transfer.
        limits: see `Limits`. 4 threads by default, but 1 over TCP with fewer than 8 usable CPUs, because each thread
            that waits for a transfer keeps a CPU busy.

    Raises:
        CapabilityError: the package (`pip install 'kvoffload[mooncake]'`) or its library `libibverbs1` is missing, or
            for "rdma" an active device. From `attach`: the pool cannot be registered.
        TypeError, ValueError: an argument; `master` without a port, say.
    """

    bytes_per_call = 16 << 20

    def __init__(
        self,
        master: str = "127.0.0.1:50051",
        *,
        identity: str,
        prefix: str = "kvoffload",
        key: bytes | None = None,
        connection: MooncakeConnection | None = None,
        segment_bytes: int = 0,
        replicas: int = 1,
        soft_pin: float | None = None,
        timeout: float = 5.0,
        name: str = "mooncake",
        limits: Limits | None = None,
    ) -> None:
        connection = given_or_default("connection", connection, MooncakeConnection)
        ports = () if connection.protocol == "tcp" else Path("/sys/class/infiniband").glob("*/ports/*/state")
        active = any("ACTIVE" in state.read_text() for state in ports)
        if connection.protocol == "rdma" and not active:  # the client would be set up, and its transfers fail
            raise CapabilityError(
                'protocol="rdma" needs a device with an active port in /sys/class/infiniband; use "tcp"'
            )
        self.protocol: Protocol = connection.protocol or ("rdma" if active else "tcp")
        # More threads verify records while others are carried. But over TCP a call polls. On 2 CPUs, 16 MiB each way
        # took 19 ms of CPU by bare calls, 24, 32 and 47 by 1, 2 and 4 threads; one was the fastest. On 16 CPUs, gets of
        # 8 records of 2 MiB by 2 and 4 threads reached 0.84 and 1.00 of the bandwidth of bare calls.
        self.threads = 4 if self.protocol == "rdma" or len(os.sched_getaffinity(0)) >= 8 else 1
        super().__init__(identity=identity, prefix=prefix, key=key, name=name, durable=False, limits=limits)
        self.capabilities = replace(self.capabilities, pins_pool=self.protocol == "rdma")
        self._masters = _addresses(master)
        self._timeout = round(1000 * seconds("timeout", timeout))
        _set_environment(self._timeout)  # before the import, which reads some of it
        needs = "MooncakeTier needs the package mooncake-transfer-engine-non-cuda"
        library = "install the library, as by `apt-get install libibverbs1 libnuma1 libcurl4`"
        self._store = import_package("mooncake.store", needs=needs, extra="mooncake", library=library)
        self._setup = {
            "master_server_addr": master,
            "metadata_server": connection.metadata_server,
            "local_hostname": _own_address(self._masters[0]) if connection.hostname is None else connection.hostname,
            "protocol": self.protocol,
            "rdma_devices": connection.devices,
            "global_segment_size": str(at_least("segment_bytes", segment_bytes, 0)),
            "local_buffer_size": "0",  # for calls that are not made here
        }
        self._replication = self._store.ReplicateConfig()  # how records are kept: given to every put
        self._replication.replica_num = at_least("replicas", replicas, 1)
        if soft_pin is not None:
            self._replication.soft_pin_action = self._store.SoftPinAction.ENABLE
            self._replication.soft_pin_ttl_ms = round(1000 * seconds("soft_pin", soft_pin))
        self._client: Any = None
        self._connecting: dict[str, list[int]] = {}  # the thread that waits for the master
        self._headers = threading.local()  # of each thread, registered
        self._registered: list[UInt8Array] = []  # must outlive the client

    # for RemoteTier -----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        try:
            self._connected()
        except ConnectionError as error:
            LOGGER.warning("%r: %s; calls will try again", self, error)
        # The interpreter must not end while a thread is in a call of the client: that aborts the process.
        atexit.register(self.close)

    def disconnect(self) -> None:
        atexit.unregister(self.close)
        client, self._client = self._client, None  # a call after its `close` would crash the process
        if client is not None:
            client.close()  # holds the interpreter's lock for up to a second
        self._registered.clear()

    def new_headers(self, count: int) -> UInt8Array:
        headers: UInt8Array | None = getattr(self._headers, "array", None)
        if headers is None or len(headers) < count:
            headers = np.empty((1 << (count - 1).bit_length(), HEADER_BYTES), np.uint8)
            self._register(self._connected(), headers)
            self._headers.array = headers
        return headers[:count]

    def fetch_parts(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        client = self._connected()
        nbytes = self.record_bytes + HEADER_BYTES
        codes = client.batch_get_into_multi_buffers(list(names), *_ranges(parts))
        misfits: list[int] = []  # records that are not of `nbytes`, as far as the master says
        for at, code in enumerate(codes):
            if code in _WRONG_SIZE:
                size = client.get_size(names[at])
                if size < 0 and size not in _MISSES:  # it does not answer, and would not for the others
                    break
                if 0 <= size != nbytes:
                    misfits.append(at)
        outcomes = [Outcome.DONE if c == nbytes else _NOT_FETCHED.get(c, Outcome.FAILED) for c in codes]
        for at in misfits:
            outcomes[at] = self.reject(names[at])
        return _checked("get", codes, outcomes)

    def store_parts(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        codes = self._connected().batch_put_from_multi_buffers(list(names), *_ranges(parts), self._replication)
        return _checked("put", codes, [_STORED.get(code, Outcome.FAILED) for code in codes])

    def have_names(self, names: Sequence[str]) -> list[bool]:
        return [code == 1 for code in _known("is_exist", self._connected().batch_is_exist(list(names)))]

    def delete_names(self, names: Sequence[str]) -> list[bool]:
        codes = self._connected().batch_remove(list(names), True)
        _known("remove", [code for code in codes if code not in _MISSES])
        return [code == 0 for code in codes]

    def delete_folder(self, folder: str) -> None:
        pattern = "^" + folder.replace(".", "[.]")
        _known("remove_by_regex", [self._connected().remove_by_regex(pattern, True)])

    def describe(self) -> dict[str, str | int]:
        from importlib.metadata import PackageNotFoundError, version

        for name in ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"):
            try:
                return {"version": f"client {version(name)}, {self.protocol}"}
            except PackageNotFoundError:
                continue
        return {"version": f"client unknown, {self.protocol}"}

    # inner workings -----------------------------------------------------------------------------------------------

    def _connected(self) -> Any:
        """Return the client. ConnectionError if no master answers, or another thread still waits for its answer."""
        if self._client is None:
            mine = [threading.get_ident()]
            try:  # not by a lock: an interrupt after its `acquire` would leave it taken
                if self._connecting.setdefault("now", mine) is not mine:
                    raise ConnectionError("the Mooncake master has not answered yet")
                self._client = self._client or self._new_client()
            finally:
                if "now" in self._connecting and self._connecting["now"] is mine:
                    del self._connecting["now"]
        return self._client

    def _new_client(self) -> Any:
        for address in self._masters:  # without the interpreter's lock, which `setup` would hold
            try:
                socket.create_connection(address, self._timeout / 1000).close()
                break
            except OSError:
                continue
        else:
            master = masked(self._setup["master_server_addr"])
            raise ConnectionError(f"no connection to the Mooncake master at {master}")
        _set_environment(self._timeout)
        refused = f"no Mooncake master answers, or none takes this client: {shown(self._setup, 500)}"
        if not can_set_up(self._setup, self._timeout / 1000 + _STARTING):
            raise ConnectionError(refused)
        client = self._store.MooncakeDistributedStore()
        code = client.setup(self._setup)  # holds the interpreter's lock for 30 ms, as the master has just answered
        if code != 0:
            raise ConnectionError(f"{refused} ({code})")
        try:
            for pool in self.pools:
                rows = max(1, _MOST_REGISTERED // pool.shape[1])
                for first in range(0, len(pool), rows):
                    self._register(client, pool[first : first + rows])
        except BaseException:
            client.close()
            self._registered.clear()
            raise
        return client

    def _register(self, client: Any, array: UInt8Array) -> None:
        code = client.register_buffer(address_of(array), array.nbytes)
        if code != 0:
            raise CapabilityError(
                f"{array.nbytes} bytes of the pool could not be registered for {self.protocol} (register_buffer "
                f"returned {code}); raise the limit of locked memory (ulimit -l)"
            )
        self._registered.append(array)


def _ranges(parts: Sequence[Parts]) -> tuple[list[list[int]], list[list[int]]]:
    return [[address_of(part) for part in record] for record in parts], [[p.nbytes for p in record] for record in parts]


def _checked(call: str, codes: Sequence[int], outcomes: list[Outcome]) -> list[Outcome]:
    """Return the outcomes. ConnectionError if all are FAILED, so that a warning is logged."""
    if outcomes and all(outcome is Outcome.FAILED for outcome in outcomes):
        _known(call, codes)
    return outcomes


def _known(call: str, codes: Sequence[int]) -> Sequence[int]:
    if codes and min(codes) < 0:
        raise ConnectionError(f"{call} of {len(codes)} names failed with {min(codes)}, an error code of Mooncake")
    return codes


# the client -----------------------------------------------------------------------------------------------------------


def _set_environment(milliseconds: int) -> None:
    """Set the variables that configure new clients and all transfers, except the user's own.

    Args:
        milliseconds: limit of a request, and of a transfer without progress, which is rounded to seconds.
    """
    transfers = str(max(1, round(milliseconds / 1000)))
    settings = {
        "MC_LOG_LEVEL": "ERROR",  # else a dozen lines on stderr for each client
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # else `setup` tries for 90 seconds
        "MC_RPC_TIMEOUT_MS": str(milliseconds),
        "MC_RPC_CONNECT_TIMEOUT_MS": str(milliseconds),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": transfers,
        "MC_TCP_STATUS_TIMEOUT_SEC": transfers,
    }
    os.environ.update({name: value for name, value in settings.items() if name not in _variables_of_user()})


@cache
def _variables_of_user() -> frozenset[str]:
    return frozenset(os.environ)


def _addresses(master: str) -> list[tuple[str, int]]:
    """Return host and port of a master, or of each server where masters register. ValueError for another string."""
    found: list[tuple[str, int]] = []
    for address in (master.rpartition("://")[2] if isinstance(master, str) else "").split(";"):
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f'master must be "host:port", such as "127.0.0.1:50051", got {shown(master)}')
        found.append((host.strip("[]"), int(port)))
    return found


def can_set_up(setup: Mapping[str, str], timeout: float) -> bool:
    """Try in a child process whether a client can be set up so, for at most `timeout` seconds.

    The client's `setup` holds the interpreter's lock until the master answers or its time is over: with a silent master
    no thread of this process would run. The child contributes no memory to the store.
    """
    given = json.dumps([{**setup, "global_segment_size": "0"}, sys.path])
    child = [get_executable(), "-c", _SET_UP]
    try:
        return subprocess.run(child, input=given, text=True, timeout=timeout, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _own_address(remote: tuple[str, int]) -> str:
    """Return this machine's address as `remote` sees it. Sends no packet."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(*remote, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()
