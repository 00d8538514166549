"""A TCP proxy between a client and a server, which delays, cuts, half-opens and corrupts what goes through it."""

from __future__ import annotations

import random
import selectors
import socket
import ssl
import struct
import threading
import time
from dataclasses import dataclass

HOST = "127.0.0.1"
_CHUNK = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: closing sends RST, and drops what was not sent


@dataclass(frozen=True)
class ProxyFaults:
    """What happens to bytes, in both directions.

    Attributes:
        delay: seconds before each chunk goes on.
        cut: how likely a chunk ends its connection, and half of it is dropped.
        corrupt: how likely a chunk has one byte changed, if it has `corrupt_from` bytes.
        silent: nothing goes on, and nothing is closed.
        refuse: connections are closed at once, those that are open too.
    """

    delay: float = 0.0
    cut: float = 0.0
    corrupt: float = 0.0
    corrupt_from: int = 1
    silent: bool = False
    refuse: bool = False


class FaultyProxy:
    """Listens on `port`, and forwards to `target`.

    Args:
        tls: with it, clients have to speak TLS; the server does not.

    Attributes:
        faults: what happens from now on; may be set at any time.
        counts: of chunks that were cut and corrupted, and of connections.
    """

    def __init__(self, target: int, seed: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.target = target
        self._tls = tls
        self.faults = ProxyFaults()
        self.counts = {"cut": 0, "corrupted": 0, "connections": 0}
        self._random = random.Random(seed)
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._listener.settimeout(0.05)
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [threading.Thread(target=self._accept, name="proxy", daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def cut_all(self) -> None:
        """End all connections at once."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            self._end(pair)

    def inject(self, data: bytes) -> None:
        """Send bytes to the clients that the server did not send."""
        with self._lock:
            for client, _ in self._pairs:
                client.sendall(data)

    def close(self) -> None:
        self._closed = True
        self.cut_all()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        self._listener.close()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                self._threads[1:] = [thread for thread in self._threads[1:] if thread.is_alive()]
                continue
            if self.faults.refuse:
                client.close()
                continue
            try:
                client.settimeout(5)
                client = client if self._tls is None else self._tls.wrap_socket(client, server_side=True)
                server = socket.create_connection((HOST, self.target), timeout=5)
            except OSError:
                client.close()
                continue
            self.counts["connections"] += 1
            pair = (client, server)
            for each in pair:
                each.settimeout(5)
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append(pair)
            thread = threading.Thread(target=self._forward, args=(pair,), name="proxy connection", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _forward(self, pair: tuple[socket.socket, socket.socket]) -> None:
        other = {pair[0]: pair[1], pair[1]: pair[0]}
        with selectors.DefaultSelector() as selector:
            try:
                for each in pair:
                    selector.register(each, selectors.EVENT_READ)
                while not self._closed and not self.faults.refuse:
                    if self.faults.silent:
                        time.sleep(0.005)
                        continue
                    for ready, _ in selector.select(0.05):
                        source = ready.fileobj
                        assert isinstance(source, socket.socket)
                        if not self._carry(source, other[source]):
                            return
            except (OSError, ValueError):  # either end is gone
                pass
            finally:
                self._end(pair)
                with self._lock:
                    self._pairs.remove(pair)

    def _carry(self, source: socket.socket, target: socket.socket) -> bool:
        """One chunk; False when the connection is over."""
        data = bytearray(source.recv(_CHUNK))
        while isinstance(source, ssl.SSLSocket) and source.pending():  # the selector does not know of it
            data += source.recv(_CHUNK)
        if not data:
            return False
        faults = self.faults
        if faults.delay:
            time.sleep(faults.delay)
        if len(data) >= faults.corrupt_from and self._random.random() < faults.corrupt:
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
            self.counts["corrupted"] += 1
        if self._random.random() < faults.cut:
            target.sendall(data[: len(data) // 2])
            self.counts["cut"] += 1
            return False
        target.sendall(data)
        return True

    @staticmethod
    def _end(pair: tuple[socket.socket, socket.socket]) -> None:
        for each in pair:
            try:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            each.close()
