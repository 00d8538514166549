"""The options of the command line for the real servers of the tests, and what these servers hold."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mooncake_servers import MooncakeServers
from servers import BUCKET, Process, need_module, s3_options, wait_until

from kvoffload.terminal.store_option import Store


def for_valkey(server: Process, *more: str) -> list[str]:
    need_module("glide_sync")
    return ["--store", "valkey", f"addresses={server.address}", *more]


def for_objects(server: Process, folder: str, **config: str) -> list[str]:
    """A folder of a bucket that exists: the first put has created it."""
    obstore = need_module("obstore")

    def puts() -> bool:
        try:
            obstore.put(_client(server), "created", b"")
        except obstore.exceptions.BaseError:
            return False
        return True

    wait_until(puts, "the S3 gateway stores an object")
    options = s3_options(server.port)
    whole = {"config": options["config"] | config, "client_options": options["client_options"]}
    texts = [f"{name}={json.dumps(value)}" for name, value in whole.items()]
    return ["--store", "objects", f"store=s3://{BUCKET}/{folder}", *texts]


@contextmanager
def patient_mooncake() -> Iterator[tuple[list[str], Store]]:
    """The option for a Mooncake Store of its own, which takes no pause of a busy machine for a death, and the store."""
    with tempfile.TemporaryDirectory() as folder, MooncakeServers(Path(folder), patience=60) as servers:
        store = Store("mooncake", {"master": servers.master.address})
        yield ["--store", "mooncake", f"master={servers.master.address}"], store


def names_in_s3(server: Process, folder: str) -> Iterator[str]:
    """All objects in a folder of the tests' bucket."""
    import obstore

    for listed in obstore.list(_client(server), folder):
        yield from (each["path"] for each in listed)


def taken_from_mooncake(store: Store) -> int:
    """Delete all records of the store; how many there were."""
    client, close = store.client()
    count = int(client.remove_by_regex("^kvoffload", True))
    close()
    return count


def _client(server: Process) -> Any:
    from obstore.store import from_url

    options = s3_options(server.port)
    return from_url(f"s3://{BUCKET}", config=options["config"], client_options=options["client_options"])
