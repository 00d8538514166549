"""The user's stores on the command line: `--valkey`, `--s3` and `--mooncake`; their tiers, and clients without a tier.

After the address follow options as NAME=VALUE; NAME=@FILE takes the value from a file, for secrets.
"""

from __future__ import annotations

import argparse
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

from kvoffload.errors import CapabilityError
from kvoffload.terminal.console import CommandError
from kvoffload.tiers import MooncakeTier, ObjectStoreTier, RemoteTier, ValkeyTier

Kind = Literal["valkey", "s3", "mooncake"]
_SECONDS = 10.0  # of `timeout`: these commands move more at a time than caches do
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_HANDSHAKE_SECONDS = 2.0
_MOST_TEXT = 160  # characters of what a client says

# What clients say, in lower case; what it means; what to do.
_MEANINGS = (
    (
        ("wrongpass", "noauth", "invalidaccesskeyid", "signaturedoesnotmatch", "unauthenticated", "401"),
        "it refuses user or password",
        "give {login}",
    ),
    (
        ("noperm", "accessdenied", "permissiondenied", "403", "forbidden"),
        "this user may not do it",
        "let the user read, write, list and delete names that begin with the prefix",
    ),
    (
        ("certificate", "unknownissuer", "unknown ca"),
        "its TLS certificate is not trusted",
        "give {certificate}",
    ),
    (
        ("tls", "ssl", "invalidcontenttype", "handshake", "eof", "broken pipe", "reset by peer"),
        "one side uses TLS, and the other does not",
        "give {tls}",
    ),
    (("nosuchbucket",), "there is no such bucket", "create it, or give another one"),
    (
        ("lookup", "name or service", "nodename", "not known", "resolve"),
        "there is no host of that name",
        "correct the address",
    ),
    (("refused",), "the connection is refused", "start the server, or correct the port"),
    (
        ("timed out", "timeout", "unreachable", "no route", "deadline"),
        "it does not answer in time",
        "see that a firewall lets this machine reach it, or give timeout=SECONDS",
    ),
)  # fmt: skip


class StoreError(CommandError):
    """A store cannot be used: `problem` is what is wrong, `remedy` what to do about it."""

    def __init__(self, store: Store, problem: str, remedy: str) -> None:
        super().__init__(f"{store}: {problem}; {remedy}")
        self.problem, self.remedy = problem, remedy


class Store(ABC):
    """A store of the user's. What its methods raise, `explained` says in words.

    Args:
        address: as on the command line.
        options: of each NAME its text.

    Attributes:
        kind: of store; the name of its option.
        remedies: options for a user and password, for a certificate, and for TLS or none.
        package: that its client is in, as pip names it.
        timeout: seconds that a call may take.

    Raises:
        CommandError: an option.
    """

    kind: ClassVar[Kind]
    package: ClassVar[str]
    remedies: ClassVar[dict[str, str]]
    names: ClassVar[tuple[str, ...]]  # of options; () for those of obstore

    def __init__(self, address: str, options: Mapping[str, str]) -> None:
        self.address, self._given = address, dict(options)
        unknown = [name for name in options if self.names and name not in self.names]
        if unknown:
            raise CommandError(f"{self}: options are {', '.join(self.names)}; got {unknown[0]!r:.80}")
        self.timeout = self._seconds()

    @abstractmethod
    def tier(self, *, identity: str, prefix: str) -> RemoteTier:
        """A tier over it, without a pool."""

    @abstractmethod
    def client(self) -> Any:
        """A client without a tier, for the calls of its package; `disconnect` closes it."""

    @abstractmethod
    def check(self, client: Any) -> None:
        """A call that every user of the store may make."""

    @abstractmethod
    def disconnect(self, client: Any) -> None:
        """Close what `client` has returned."""

    def explained(self, error: Exception) -> StoreError:
        """What an error means, and what to do about it."""
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, StoreError):
            return error
        if isinstance(error, CapabilityError):
            problem, _, remedy = text.rpartition("; ")
            return StoreError(self, problem, remedy.removeprefix("install it: "))
        for words, problem, remedy in _MEANINGS:
            if any(word in text.lower() for word in words):
                return StoreError(self, problem, remedy.format(**self.remedies))
        return StoreError(
            self,
            f"{text.partition(' Debug source')[0]:.{_MOST_TEXT}}",
            "see that address and options are those of the store",
        )

    def option(self, name: str, default: str = "") -> str:
        """The text of an option."""
        return self._given.get(name, default)

    def __str__(self) -> str:
        return f"--{self.kind} {self.address}"

    def _flag(self, name: str) -> bool:
        text = self._given.get(name, "false")
        if text.lower() not in _TRUTH:
            raise CommandError(f"{self}: {name} must be true or false, got {text!r:.80}")
        return _TRUTH[text.lower()]

    def _seconds(self) -> float:
        value = _SECONDS
        with suppress(ValueError):
            value = float(self._given.get("timeout", _SECONDS))
            if 0 < value < 1e6:
                return value
        raise CommandError(f"{self}: timeout must be a number of seconds above 0, got {self._given['timeout']!r:.80}")


class ValkeyStore(Store):
    """Servers of Valkey or Redis: "host:port", or several with commas."""

    kind = "valkey"
    package = "valkey-glide-sync"
    remedies: ClassVar = {
        "login": "username=NAME and password=@FILE",
        "certificate": "ca_file=FILE, which has signed it",
        "tls": "tls=true, or leave it out",
    }
    names = ("username", "password", "tls", "ca_file", "cert_file", "key_file", "cluster", "timeout")

    def tier(self, *, identity: str, prefix: str) -> RemoteTier:
        return ValkeyTier(self.address.split(","), identity=identity, prefix=prefix, **self._arguments())

    def client(self) -> Any:
        self.tier(identity="", prefix="kvoffload")  # the package is there, and the arguments are right
        import glide_sync as glide

        given, kind = self._arguments(), "Cluster" if self._flag("cluster") else ""
        tls = glide.TlsAdvancedConfiguration(
            root_pem_cacerts=Path(given["ca_file"]).read_bytes() if given["ca_file"] else None,
            client_cert_path=given["cert_file"],
            client_key_path=given["key_file"],
        )
        password, milliseconds = given["password"], round(1000 * self.timeout)
        advanced = getattr(glide, f"AdvancedGlide{kind}ClientConfiguration")
        configuration = getattr(glide, f"Glide{kind}ClientConfiguration")(
            addresses=[glide.NodeAddress(*each) for each in self._addresses()],
            use_tls=given["tls"],
            credentials=None if password is None else glide.ServerCredentials(password, given["username"]),
            request_timeout=milliseconds,
            lazy_connect=True,
            advanced_config=advanced(connection_timeout=milliseconds, tls_config=tls),
        )
        return getattr(glide, f"Glide{kind}Client").create(configuration)

    def check(self, client: Any) -> None:
        for host, port in self._addresses():  # the client says "timed out" of all that is wrong with a connection
            socket.create_connection((host, port), self.timeout).close()
        try:
            client.ping()
        except Exception as error:
            if "timed out" in str(error):
                self._try_tls()
            raise

    def _addresses(self) -> list[tuple[str, int]]:
        parts = [each.rpartition(":") for each in self.address.split(",")]
        return [(host.strip("[]"), int(port)) for host, _, port in parts]

    def _try_tls(self) -> None:
        """Raise ConnectionError if one side alone uses TLS, SSLError if both do and the certificate is not trusted."""
        address, wanted, speaks = self._addresses()[0], self._flag("tls"), True
        context = ssl.create_default_context(cafile=self._given.get("ca_file"))
        try:
            with socket.create_connection(address, min(self.timeout, _HANDSHAKE_SECONDS)) as connection:
                context.wrap_socket(connection, server_hostname=address[0]).close()
        except ssl.SSLCertVerificationError:
            if wanted:
                raise
        except OSError:
            speaks = False
        if speaks != wanted:
            raise ConnectionError("the server uses TLS" if speaks else "the server does not use TLS")

    def disconnect(self, client: Any) -> None:
        client.close()

    def _arguments(self) -> dict[str, Any]:
        texts = {name: self._given.get(name) for name in ("username", "password", "ca_file", "cert_file", "key_file")}
        return texts | {name: self._flag(name) for name in ("tls", "cluster")} | {"timeout": self.timeout}


class ObjectStore(Store):
    """A bucket of S3, or another URL of obstore's; the options are obstore's, too."""

    kind = "s3"
    package = "obstore"
    remedies: ClassVar = {
        "login": "access_key_id=NAME and secret_access_key=@FILE",
        "certificate": "root_certificate=@FILE, which has signed it",
        "tls": "endpoint=https://... or endpoint=http://...",
    }
    names = ()
    _TEXTS = ("root_certificate", "proxy_url")  # options of connections
    _FLAGS = ("allow_http", "allow_invalid_certificates", "http1_only")

    def tier(self, *, identity: str, prefix: str) -> RemoteTier:
        config, connections = self._arguments()
        return ObjectStoreTier(
            self.address,
            identity=identity,
            prefix=prefix,
            config=config,
            client_options=connections,
            timeout=self.timeout,
        )

    def client(self) -> Any:
        self.tier(identity="", prefix="kvoffload")
        import obstore.store

        config: Any
        config, connections = self._arguments()
        if self.address.startswith(("file:", "memory:")):
            return obstore.store.from_url(self.address, **config)
        seconds = timedelta(seconds=self.timeout)
        options: Any = {"timeout": seconds, "connect_timeout": seconds, **connections}
        none: Any = {"max_retries": 0}
        return obstore.store.from_url(self.address, config=config, client_options=options, retry_config=none)

    def check(self, client: Any) -> None:
        import obstore

        next(iter(obstore.list(client, "kvoffload", chunk_size=1)), None)

    def disconnect(self, client: Any) -> None:
        pass

    def _arguments(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Those of the store, and those of connections; an endpoint with http:// asks for plain HTTP."""
        connections: dict[str, Any] = {"allow_http": self._given.get("endpoint", "").startswith("http://")}
        connections |= {name: self._given[name] for name in self._TEXTS if name in self._given}
        connections |= {name: self._flag(name) for name in self._FLAGS if name in self._given}
        config = {name: text for name, text in self._given.items() if name not in (*connections, "timeout")}
        return config, connections


class MooncakeStore(Store):
    """A Mooncake Store, by its master: "host:port", or where masters register."""

    kind = "mooncake"
    package = "mooncake-transfer-engine-non-cuda"
    remedies: ClassVar = dict.fromkeys(("login", "certificate", "tls"), "another address: Mooncake has none of these")
    names = ("metadata_server", "hostname", "protocol", "devices", "timeout", "metrics_port")

    def tier(self, *, identity: str, prefix: str) -> RemoteTier:
        given: dict[str, Any] = {name: self._given[name] for name in self.names[:4] if name in self._given}
        return MooncakeTier(self.address, identity=identity, prefix=prefix, timeout=self.timeout, **given)

    def client(self) -> Any:
        tier = self.tier(identity="", prefix="kvoffload")
        assert isinstance(tier, MooncakeTier)
        host = self._reached_from()
        from mooncake.store import MooncakeDistributedStore

        client = MooncakeDistributedStore()
        code = client.setup(
            {
                "master_server_addr": self.address,
                "metadata_server": self._given.get("metadata_server", "P2PHANDSHAKE"),
                "local_hostname": self._given.get("hostname", host),
                "protocol": tier.protocol,
                "rdma_devices": self._given.get("devices", ""),
                "global_segment_size": "0",
                "local_buffer_size": "0",
            }
        )
        if code != 0:
            raise ConnectionError(f"the master has not taken this client within the timeout: error {code} of Mooncake")
        return client

    def check(self, client: Any) -> None:
        code = client.health_check()
        if code != 0:
            raise ConnectionError(f"the master has not answered within the timeout: health_check returned {code}")

    def disconnect(self, client: Any) -> None:
        client.close()

    def _reached_from(self) -> str:
        """This machine's address on a connection to the first master."""
        host, _, port = self.address.rpartition("://")[2].split(";")[0].rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), self.timeout) as connection:
            return str(connection.getsockname()[0])


_KINDS: tuple[tuple[type[Store], str, str], ...] = (
    (ValkeyStore, "HOST:PORT", "Valkey or Redis; N=V: tls=true and others"),
    (ObjectStore, "URL", "an object store, such as s3://bucket/folder"),
    (MooncakeStore, "MASTER", "a Mooncake Store, by HOST:PORT"),
)


def add_store_options(parser: argparse.ArgumentParser) -> None:
    """The options of a store each; `stores_of` reads them."""
    for kind, address, text in _KINDS:
        metavar = (address, "N=V")
        parser.add_argument(f"--{kind.kind}", nargs="+", default=None, metavar=metavar, help=text)


def stores_of(arguments: argparse.Namespace) -> list[Store]:
    """The stores that were asked for; CommandError for a wrong option of one."""
    given = [(kind, getattr(arguments, kind.kind)) for kind, _, _ in _KINDS]
    return [kind(words[0], _options(kind.kind, words[1:])) for kind, words in given if words]


def _options(kind: Kind, words: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not name or not equals:
            raise CommandError(f"--{kind}: options after the address must be NAME=VALUE, got {word!r:.80}")
        if text.startswith("@"):
            try:
                text = Path(text[1:]).read_text().rstrip("\n")
            except OSError as error:
                raise CommandError(f"--{kind}: {name}=@FILE cannot be read: {error.strerror}") from error
        found[name] = text
    return found
