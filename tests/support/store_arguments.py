"""The options of the command line for the real servers of the tests."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from typing import Any

from mooncake_servers import MooncakeServers
from servers import ACCESS_KEY, BUCKET, HOST, SECRET_KEY, Process, need_module, wait_until


def for_valkey(server: Process, *options: str) -> list[str]:
    need_module("glide_sync")
    return ["--valkey", server.address, *options]


def for_s3(server: Process, folder: str = "commands", secret: str = SECRET_KEY) -> list[str]:
    """The first put creates the bucket."""
    obstore = need_module("obstore")

    def puts() -> bool:
        try:
            obstore.put(_client(server), "created", b"")
        except obstore.exceptions.BaseError:
            return False
        return True

    wait_until(puts, "the S3 gateway stores an object")
    keys = [f"access_key_id={ACCESS_KEY}", f"secret_access_key={secret}"]
    return ["--s3", f"s3://{BUCKET}/{folder}", f"endpoint=http://{server.address}", "region=us-east-1", *keys]


def for_mooncake(servers: MooncakeServers) -> list[str]:
    return ["--mooncake", servers.master.address, f"metrics_port={servers.metrics}"]


def names_in_s3(server: Process, folder: str) -> Iterator[str]:
    """All objects in a folder of the tests' bucket."""
    import obstore

    for listed in obstore.list(_client(server), folder):
        yield from (each["path"] for each in listed)


def _client(server: Process) -> Any:
    from obstore.store import S3Store

    return S3Store(
        BUCKET, endpoint=f"http://{server.address}", region="us-east-1", access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY, client_options={"allow_http": True},
    )  # fmt: skip


def records_in_mooncake(servers: MooncakeServers) -> int:
    """All records of the store, as its master counts them."""
    with urllib.request.urlopen(f"http://{HOST}:{servers.metrics}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return int(float(next(line.split()[1] for line in lines if line.startswith("master_key_count "))))
