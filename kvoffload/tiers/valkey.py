"""ValkeyTier: records in a Valkey or Redis server or cluster, through valkey-glide-sync."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvoffload.cache.tiering.tier import Outcome
from kvoffload.internal.checks import flag, seconds, shown
from kvoffload.tiers.options import Limits, given_or_default, import_package
from kvoffload.tiers.refusals import outcome_of
from kvoffload.tiers.remote import HEADER_BYTES, Parts, RemoteTier

_ERRORS = (1, 10)  # after which a client of one server, and of a cluster, is replaced
_CONNECTING = 2  # of the timeout one part in so many is for connecting, the rest for the command
_SLOTS = 16384  # of a cluster
_SCANNED = 1000  # names that one call of SCAN looks at


class _OutOfStepError(ConnectionError):
    """A connection gave the answer of another command."""


@dataclass(frozen=True, kw_only=True)
class ValkeyConnection:
    """How `ValkeyTier` connects. The repr shows neither `password` nor `options`.

    Attributes:
        username, password: for AUTH. With a password alone: the server's user "default". The server's ACL must give the
            user "~{<prefix>/*" (names begin with that brace, as in "{kvoffload/1/": a hash tag), +mget +set +strlen
            +unlink +scan, for the client itself +info +client +ping, and in a cluster +cluster|slots +cluster|myid.
        tls: encrypt connections, and verify the servers' certificates. The files below do not turn it on.
        ca_file: PEM file with the certificates to trust instead of the system's. `attach` reads it, and so does each
            new connection: keep it there.
        cert_file, key_file: PEM files with this client's certificate and key, both or neither, for servers that ask for
            one. Read when a thread connects, and again later: you may renew them.
        options: further arguments for valkey-glide's `GlideClientConfiguration`, or `GlideClusterClientConfiguration`
            in a cluster. They override the ones that the tier sets.

    Raises:
        ValueError: there is a username and no password, or `tls` is neither True nor False.
    """

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        flag("tls", self.tls)
        if self.username is not None and self.password is None:
            raise ValueError("username needs a password, got None")


class ValkeyTier(RemoteTier):
    """Records in Valkey or Redis: one server with its replicas, or a cluster.

    The server evicts by its own `maxmemory-policy`. A record is several values in one hash slot: the header, and the
    bytes of each device. If the server evicted one of the values, or two machines put the key at the same time and
    their values are mixed, the record is a miss.

    `attach` does not connect: each thread connects at its first call. If the server cannot be reached, or refuses the
    password, keys are FAILED, and the logger "kvoffload" warns; nothing raises. `kvoffload doctor --store valkey
    addresses=HOST:PORT` tries a server.

    Args:
        addresses: "host:port", or a list of them: a primary and its replicas, or any nodes of a cluster.
        identity: a text for what the bytes depend on besides tokens and layout, such as model, revision and shard.
        prefix, key, name, limits: see `RemoteTier`; 4 threads by default.
        cluster: the servers are a cluster.
        connection: login, encryption and further options of the client; None: `ValkeyConnection()`.
        expiry: the server deletes a record so many seconds after its put, even if it is read. None: it does not.
        timeout: seconds for a command, at least 0.002: one half to connect, the other half until the answer is there.

    Raises:
        CapabilityError: valkey-glide-sync is missing (`pip install 'kvoffload[valkey]'`).
        TypeError, ValueError: a bad argument. From `attach`: OSError for `ca_file`, and what the client's configuration
            refuses of `options`. Other faults of the connection show when a thread connects: keys are FAILED.
    """

    bytes_per_call = 1 << 20  # of small records in one command: at 64 KiB twice as fast as one by one; more is slower

    def __init__(
        self,
        addresses: str | Sequence[str] = "127.0.0.1:6379",
        *,
        identity: str,
        prefix: str = "kvoffload",
        key: bytes | None = None,
        cluster: bool = False,
        connection: ValkeyConnection | None = None,
        expiry: float | None = None,
        timeout: float = 2.0,
        name: str = "valkey",
        limits: Limits | None = None,
    ) -> None:
        super().__init__(identity=identity, prefix=prefix, key=key, name=name, durable=False, limits=limits)
        needs = "ValkeyTier needs the package valkey-glide-sync"
        self._glide = import_package("glide_sync", needs=needs, extra="valkey")
        # Unless the program has set it up: it writes to standard output, and errors reach the library's log without it.
        self._glide.Logger.init(self._glide.LogLevel.OFF)
        given = [addresses] if isinstance(addresses, str) else addresses
        if not isinstance(given, Sequence) or not given:
            raise ValueError(f"addresses must be one or more, got {shown(addresses)}")
        self._addresses = list(map(_address, given))
        self.cluster = cluster
        self._connection = given_or_default("connection", connection, ValkeyConnection)
        self._expiry = None if expiry is None else round(1000 * seconds("expiry", expiry))
        self._timeout = round(1000 * seconds("timeout", timeout, minimum=0.002))
        self._clients: list[Any] = []  # all that are open
        self._own = threading.local()  # `client`: the calling thread's

    # for RemoteTier -----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        self._configuration()  # what is wrong with `options` and the files of certificates is known now

    def disconnect(self) -> None:
        while self._clients:
            self._clients.pop().close()

    def fetch_parts(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for group in self._groups(names):
            outcomes += self._fetch(names[group], parts[group])
        return outcomes

    def store_parts(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for group in self._groups(names):
            outcomes += [self._store(names[group], parts[group])] * len(names[group])
        return outcomes

    def have_names(self, names: Sequence[str]) -> list[bool]:
        return [found is True for found in self._look(names)]

    def delete_names(self, names: Sequence[str]) -> list[bool]:
        batch = self._batch()
        for name in names:
            batch.unlink(self._part_names(name))
        return [bool(deleted) for deleted in self._counts(batch)]

    def delete_folder(self, folder: str) -> None:
        for route in self._routes() if self.cluster else [None]:
            cursor = b"0"
            while True:
                cursor, found = self._command("SCAN", cursor, "MATCH", f"{{{folder}*", "COUNT", _SCANNED, route=route)
                if found:
                    self._command("UNLINK", *found)
                if cursor == b"0":
                    break

    def describe(self) -> dict[str, str | int]:
        """Ask the server (in a cluster, some node) for `version`, `used_bytes`, `max_bytes` (0: no limit) and its
        eviction policy, `when_full`. Call it after `attach` and before `close`. Raises the client's error if the server
        does not answer within the tier's `timeout`.
        """
        route = self._glide.RandomNode() if self.cluster else None
        answer = self._command("INFO", "server", "memory", route=route)
        lines = dict(line.split(":", 1) for line in answer.decode().splitlines() if ":" in line)
        return {
            "version": lines.get("valkey_version", lines.get("redis_version", "")),
            "used_bytes": int(lines.get("used_memory", 0)),
            "max_bytes": int(lines.get("maxmemory", 0)),
            "when_full": lines.get("maxmemory_policy", ""),
        }

    def reject(self, name: str) -> Outcome:
        """Count a record as corrupt, delete it and return MISSING. Never raises: if deleting fails, that is logged.

        Also closes this thread's connection, which may have changed the bytes; the next call makes another one.
        """
        self._drop_client()
        return super().reject(name)

    # inner workings -----------------------------------------------------------------------------------------------

    def _routes(self) -> list[Any]:
        """Return a route to each primary of the cluster. Raises if one cannot be reached, or slots are missing.

        The timeout does not bound glide's own scan of a cluster, and its route to all primaries leaves out primaries
        without a connection.
        """
        ranges = self._command("CLUSTER", "SLOTS", route=self._glide.RandomNode())
        if sum(last - first + 1 for first, last, *_ in ranges) != _SLOTS:
            raise ConnectionError("the servers do not know of all slots of the cluster")
        routes = {node[2]: self._glide.ByAddressRoute(node[0].decode(), node[1]) for _, _, node, *_ in ranges}
        for identity, route in routes.items():
            if self._command("CLUSTER", "MYID", route=route) != identity:
                raise ConnectionError(f"{route.host}:{route.port} is not the server that the cluster names")
        return list(routes.values())

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """Yield the thread's client. After `_ERRORS` errors in a row it is closed, and the next call makes another one.

        A client of glide connects again by itself, but it never leaves a connection whose answers are out of step. A
        cluster's client is kept longer, because its timeout does not bound each step of connecting.
        """
        client = getattr(self._own, "client", None)
        if client is None:
            client = self._own.client = self._new_client()
            self._own.errors = 0
            self._clients.append(client)
        try:
            yield client
            self._own.errors = 0
        except BaseException as error:
            self._own.errors += 1
            if isinstance(error, _OutOfStepError) or self._own.errors >= _ERRORS[self.cluster]:
                self._drop_client()
            raise

    def _command(self, *arguments: Any, route: Any = None) -> Any:
        with self._connected() as client:
            given = [each if isinstance(each, bytes) else str(each) for each in arguments]
            return client.custom_command(given, route=route) if self.cluster else client.custom_command(given)

    def _drop_client(self) -> None:
        client, self._own.client = getattr(self._own, "client", None), None
        if client is not None:
            self._clients.remove(client)
            client.close()

    def _new_client(self) -> Any:
        kind = "Cluster" if self.cluster else ""
        return getattr(self._glide, f"Glide{kind}Client").create(self._configuration())

    def _configuration(self) -> Any:
        glide = self._glide
        kind = "Cluster" if self.cluster else ""
        configuration = getattr(glide, f"Glide{kind}ClientConfiguration")
        advanced = getattr(glide, f"AdvancedGlide{kind}ClientConfiguration")
        given = self._connection
        login = None if given.password is None else glide.ServerCredentials(given.password, given.username)
        tls = glide.TlsAdvancedConfiguration(
            root_pem_cacerts=None if given.ca_file is None else Path(given.ca_file).read_bytes(),
            client_cert_path=given.cert_file,
            client_key_path=given.key_file,
        )
        arguments: dict[str, Any] = {
            "addresses": [glide.NodeAddress(host, port) for host, port in self._addresses],
            "use_tls": given.tls,
            "credentials": login,
            "request_timeout": self._timeout - self._timeout // _CONNECTING,
            "lazy_connect": True,  # so that the time to connect is bounded by the next line
            "advanced_config": advanced(self._timeout // _CONNECTING, tls),
        }
        return configuration(**arguments | dict(given.options))

    def _groups(self, names: Sequence[str]) -> list[slice]:
        """Divide records among commands: all in one; in a cluster one each, since each may be on another server."""
        step = 1 if self.cluster else len(names)
        return [slice(at, at + step) for at in range(0, len(names), step)]

    def _part_names(self, name: str) -> list[str]:
        """Return the names of header and ranges. The text in braces puts them all into one slot of a cluster."""
        return [f"{{{name}}}:{part}" for part in range(1 + len(self.pools))]

    def _fetch(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        part_names = [each for name in names for each in self._part_names(name)]
        try:
            with self._connected() as client:
                found = client.mget(part_names, buffers=[part.data for record in parts for part in record])
                if not isinstance(found, list) or len(found) != len(part_names):
                    raise _OutOfStepError(f"{len(part_names)} values expected, got {shown(found)}")
        except self._glide.RequestError as error:
            answered = type(error) is self._glide.RequestError  # else its time is over, or the server is gone
            outcomes = self._without_misfits(names, parts) if answered else []
            if not outcomes:
                raise
            return outcomes
        lengths = iter(found)  # of the values that glide has written to the parts; None: there is no string
        outcomes = []
        for name, record in zip(names, parts, strict=True):
            of_record = [next(lengths) for _ in record]
            if None not in of_record:
                whole = [int(length or 0) for length in of_record] == [part.nbytes for part in record]
                outcomes.append(Outcome.DONE if whole else self.reject(name))
            else:  # evicted, unless a part is a hash, say
                partly = any(length is not None for length in of_record)
                outcomes.append(self.reject(name) if partly and self._look([name]) == [None] else Outcome.MISSING)
        return outcomes

    def _without_misfits(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        """Do `_fetch` without values that are longer than their parts: one of these fails the whole command. [] if all
        fit.

        The error is no argument: a frame of its own traceback would hold it, and the garbage collector would crash on
        the buffers in glide's frames.
        """
        looks = dict(zip(names, self._look(names), strict=True))
        outcomes = {name: self.reject(name) for name in names if looks[name] is None}
        if not outcomes:
            return []
        others = [at for at, name in enumerate(names) if name not in outcomes]
        if others:
            left = [names[at] for at in others]
            outcomes.update(zip(left, self._fetch(left, [parts[at] for at in others]), strict=True))
        return [outcomes[name] for name in names]

    def _look(self, names: Sequence[str]) -> list[bool | None]:
        """Ask for each record whether all parts are there. None: a part is no string of the right size."""
        sizes = [HEADER_BYTES, *(pool.shape[1] for pool in self.pools)]
        batch = self._batch()
        for name in names:
            for part_name in self._part_names(name):
                batch.strlen(part_name)
        counts = iter(self._counts(batch))
        lengths = [[next(counts) for _ in sizes] for _ in names]
        fit = [all(length in (0, size) for length, size in zip(each, sizes, strict=True)) for each in lengths]
        return [all(each) if fits else None for each, fits in zip(lengths, fit, strict=True)]  # 0: there is no value

    def _store(self, names: Sequence[str], parts: Sequence[Parts]) -> Outcome:
        glide = self._glide
        expiry = None if self._expiry is None else glide.ExpirySet(glide.ExpiryType.MILLSEC, self._expiry)
        batch = self._batch()
        for name, record in zip(names, parts, strict=True):
            for part_name, part in zip(self._part_names(name), record, strict=True):
                batch.set(part_name, part.data, expiry=expiry)
        with self._connected() as client:
            try:
                answer = client.exec(batch, True)
            except glide.RequestError as error:
                if outcome_of(error) is Outcome.FAILED:
                    raise
                return Outcome.DECLINED  # and the connection is kept
            if not isinstance(answer, list) or set(answer) != {"OK"}:
                raise _OutOfStepError(f"OK expected of each value, got {shown(answer)}")
        return Outcome.DONE

    def _counts(self, batch: Any) -> list[int | None]:
        """Send a batch of commands and return their counts; None for a value that is no string."""
        with self._connected() as client:
            answer = client.exec(batch, False)
            if not isinstance(answer, list):
                raise _OutOfStepError(f"counts expected, got {shown(answer)}")
            return [_count(each) for each in answer]

    def _batch(self) -> Any:
        return (self._glide.ClusterBatch if self.cluster else self._glide.Batch)(False)


def _count(answer: Any) -> int | None:
    if isinstance(answer, Exception):
        if "WRONGTYPE" not in str(answer):
            raise type(answer)(*answer.args)  # another one: a frame of this one's traceback has a list with it
        return None
    if not isinstance(answer, int):
        raise _OutOfStepError(f"a count expected, got {shown(answer)}")
    return answer


def _address(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not host or set(host) & set("/@") or not colon or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f'addresses must be "host:port", such as "127.0.0.1:6379", without scheme and login, got {shown(address)}'
        )
    return host.strip("[]"), int(port)
