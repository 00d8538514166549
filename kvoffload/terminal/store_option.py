"""`--store KIND NAME=VALUE ...` of `doctor` and `bench remote`: a tier over a remote store, and its client alone.

KIND and the names are for `load_tier`. A VALUE is JSON, "env:VARIABLE" for secrets that should not be in the list of
processes, or else text.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvoffload.errors import CapabilityError
from kvoffload.internal.checks import masked, shown
from kvoffload.terminal.console import CommandError
from kvoffload.tiers import RemoteTier, load_tier
from kvoffload.tiers.files import PAGE

_ENVIRONMENT = "env:"
_SECONDS = 10.0  # of `timeout`: these commands move more at a time than caches do
_HANDSHAKE_SECONDS = 2.0
_MOST_TEXT = 400  # characters of what a client says: the URL comes before the reason

_STORES = {  # the argument that says where it is, and an example of its arguments
    "valkey": ("addresses", "addresses=cache:6379 password=env:CACHE_PASSWORD"),
    "objects": ("store", "store=s3://bucket/folder"),
    "mooncake": ("master", "master=cache:50051"),
}
_UNKNOWN = ("", "name=value")
KINDS = tuple(_STORES)  # of stores whose clients are known

# What clients say, in lower case; what it means; what to do.
_MEANINGS = (
    (
        ("wrongpass", "noauth", "invalidaccesskeyid", "signaturedoesnotmatch", "unauthenticated", "401"),
        "it refuses user or password",
        "give username and password=env:VARIABLE, or of S3 access_key_id and secret_access_key in config",
    ),
    (
        ("noperm", "accessdenied", "permissiondenied", "403", "forbidden"),
        "it refuses this user",
        "see name and password, and let the user read, write, list and delete names that begin with the prefix",
    ),
    (
        ("certificate", "unknownissuer", "unknown ca"),
        "its TLS certificate is not trusted",
        "give ca_file, or of S3 root_certificate in client_options",
    ),
    (
        ("tls", "ssl", "invalidcontenttype", "handshake", "broken pipe", "reset by peer"),
        "one side uses TLS, and the other does not",
        "give tls=true or leave it out, or of S3 an endpoint with https:// or http://",
    ),
    (("nosuchbucket",), "there is no such bucket", "create it, or give another one"),
    (
        ("lookup", "name or service", "nodename", "not known", "resolve"),
        "there is no host of that name",
        "correct the address",
    ),
    (("refused", "no connection"), "the connection is refused", "start the server, or correct the address"),
    (
        ("timed out", "timeout", "unreachable", "no route", "deadline"),
        "it does not answer in time",
        "check that the server runs and that this machine reaches it, or give a longer timeout",
    ),
)


class StoreError(CommandError):
    """A store cannot be used: the `problem`, and its `remedy`."""

    def __init__(self, store: Store, problem: str, remedy: str) -> None:
        super().__init__(f"{store}: {problem}; {remedy}")
        self.problem, self.remedy = problem, remedy


class Store:
    """The store that `--store` names."""

    def __init__(self, kind: str, arguments: Mapping[str, Any]) -> None:
        self.kind, self.arguments = kind, dict(arguments)
        if kind in KINDS:
            self.arguments.setdefault("timeout", _SECONDS)

    def tier(self, *, identity: str, prefix: str) -> RemoteTier:
        """Make a tier over it, without a pool."""
        tier = load_tier(self.kind, **(self.arguments | {"identity": identity, "prefix": prefix}))
        if not isinstance(tier, RemoteTier):
            raise TypeError(f"{self.kind} is not a tier over a remote store; try its folder with --path")
        return tier

    def client(self) -> tuple[Any, Callable[[], None]]:
        """Return a client without a tier, and a function that closes it. Its errors are those of its package."""
        if self.kind not in KINDS:
            raise StoreError(self, "its client is not known", f"give one of {', '.join(KINDS)}")
        tier: Any = self.tier(identity="", prefix="kvoffload")
        if self.kind == "objects":
            return tier._store, lambda: None
        client = tier._new_client()
        return client, client.close

    def check(self) -> None:
        """Ask the store for a record."""
        try:
            tier = self.tier(identity="", prefix="kvoffload-check")
            tier.attach([np.frombuffer(mmap.mmap(-1, PAGE), np.uint8).reshape(1, PAGE)], bytes(16))
            try:
                tier.have_records([b"none"])
            finally:
                tier.close()
        except Exception as error:  # of any client
            raise self.explained(error) from error

    def explained(self, error: Exception) -> StoreError:
        """Return the meaning of an error, and its remedy."""
        if isinstance(error, StoreError):
            return error
        if self.kind == "valkey" and "timed out" in str(error):  # glide says so of all that is wrong with connections
            error = _tried_connection(self.arguments) or error
        text = masked(" ".join(str(error).split())).partition(" Debug source")[0] or type(error).__name__
        if isinstance(error, CapabilityError):
            problem, _, remedy = text.rpartition("; ")
            return StoreError(self, problem, remedy.removeprefix("install it: "))
        if isinstance(error, TypeError | ValueError | KeyError) and not isinstance(error, OSError):
            example = _STORES.get(self.kind, _UNKNOWN)[1]
            remedy = f"see the arguments of its tier in docs/reference/tiers.md: --store {self.kind} {example}"
            return StoreError(self, f"{text:.{_MOST_TEXT}}", remedy)
        for words, problem, remedy in _MEANINGS:
            if any(word in str(error).lower() for word in words):
                return StoreError(self, f"{problem} ({text:.{_MOST_TEXT}})", remedy)
        return StoreError(self, f"{text:.{_MOST_TEXT}}", "see what the store's log says")

    def __str__(self) -> str:
        address = self.arguments.get(_STORES.get(self.kind, _UNKNOWN)[0], "")
        return masked(f"--store {self.kind} {address}".rstrip())


def add_store_option(parser: argparse.ArgumentParser, text: str) -> None:
    """Add the option `--store`, which may be repeated; `store_of` reads each."""
    parser.add_argument(
        "--store", nargs="+", action="append", default=[], metavar=("KIND", "NAME=VALUE"), help=text
    )  # fmt: skip


def store_of(words: Sequence[str]) -> Store:
    """Return the store of one `--store`."""
    return Store(words[0], dict(map(argument, words[1:])))


def argument(word: str, variables: Mapping[str, str] = os.environ) -> tuple[str, Any]:
    """Return a tier's argument from "name=value"; ValueError if it is malformed, or its variable is not set."""
    name, equals, value = word.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"--store takes arguments as name=value, got {shown(word)}")
    if value.startswith(_ENVIRONMENT):
        variable = value.removeprefix(_ENVIRONMENT)
        if variable not in variables:
            raise ValueError(f"{name}={value}: the environment has no variable {variable}")
        return name, variables[variable]
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


# what is wrong with a connection --------------------------------------------------------------------------------------


def _addresses(given: Mapping[str, Any]) -> list[tuple[str, int]]:
    addresses = given.get("addresses", "127.0.0.1:6379")
    parts = [each.rpartition(":") for each in ([addresses] if isinstance(addresses, str) else addresses)]
    return [(host.strip("[]"), int(port)) for host, _, port in parts]


def _tried_connection(given: Mapping[str, Any]) -> Exception | None:
    """Connect to the first server, and return the trouble with that, or with TLS on it; None if there is none."""
    address, wanted, speaks = _addresses(given)[0], bool(given.get("tls")), True
    try:
        connection = socket.create_connection(address, _HANDSHAKE_SECONDS)
    except OSError as error:
        return ConnectionError(f"{address[0]}:{address[1]}: {error}")
    with connection:
        try:
            context = ssl.create_default_context(cafile=given.get("ca_file"))
            context.wrap_socket(connection, server_hostname=address[0]).close()
        except ssl.SSLCertVerificationError as error:
            if wanted:
                return error
        except OSError:
            speaks = False
    if speaks != wanted:
        return ConnectionError("the server uses TLS" if speaks else "the server does not use TLS")
    return None
