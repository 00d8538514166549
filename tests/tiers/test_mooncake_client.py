"""Mooncake's client is set up in a child process first: with a silent master it would stop all threads of this one."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from interrupts import interrupt_at
from remote_sessions import RemoteSession

from kvoffload.tiers import Limits, MooncakeConnection, MooncakeTier, Outcome
from kvoffload.tiers.mooncake import can_set_up

TCP = MooncakeConnection(protocol="tcp")
CLIENT = """
import os, time
FOLDER = os.path.dirname(__file__)

class ReplicateConfig:
    replica_num = 1

class MooncakeDistributedStore:
    def setup(self, config):
        with open(FOLDER + "/setups", "a") as file:
            print(os.getpid(), config["global_segment_size"], config["local_hostname"], file=file)
        with open(FOLDER + "/answer") as file:
            answer = file.read()
        if answer == "none":
            time.sleep(1000)
        return int(answer)

    def register_buffer(self, address, nbytes):
        return 0

    def batch_is_exist(self, names):
        return [1] * len(names)

    def batch_get_into_multi_buffers(self, names, addresses, sizes):
        return [-800] * len(names)

    def batch_put_from_multi_buffers(self, names, addresses, sizes, config):
        with open(FOLDER + "/stored") as file:
            return list(map(int, file.read().split()))

    def get_size(self, name):
        with open(FOLDER + "/asked", "a") as file:
            print(name, file=file)
        return -901

    def close(self):
        pass
"""


class Client:
    """The package mooncake of a test, which writes down who sets up a client, and answers what it is told to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def answer(self, code: str) -> None:
        (self.folder / "answer").write_text(code)

    def asked(self) -> list[str]:
        """The names of the records whose size it was asked for."""
        return (self.folder / "asked").read_text().split()

    def setups(self) -> list[tuple[bool, int]]:
        """Of each: whether it was in this process, and the memory that it would contribute."""
        return [(int(pid) == os.getpid(), int(nbytes)) for pid, nbytes, _ in self._lines()]

    def hostnames(self) -> set[str]:
        """Under which others are to reach the clients."""
        return {hostname for _, _, hostname in self._lines()}

    def _lines(self) -> list[list[str]]:
        return [line.split() for line in (self.folder / "setups").read_text().splitlines()]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    for name in imported():
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "mooncake"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "store.py").write_text(CLIENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Client(folder)
    for name in imported():
        del sys.modules[name]


def imported() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "mooncake"]


@pytest.fixture
def master() -> Iterator[str]:
    """It accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_client_is_set_up_here_only_if_it_could_be_in_a_child(
    client: Client, master: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.answer("-1")
    with RemoteSession(MooncakeTier(master, identity="t", connection=TCP, segment_bytes=4096)) as session:
        assert "no Mooncake master answers" in caplog.text
        assert session.tier.exists([b"k"]).wait(30) == [Outcome.FAILED]
        assert client.setups() == [(False, 0)] * 2
        client.answer("0")
        assert session.exists(b"k")
        assert session.exists(b"k")
        assert client.setups()[2:] == [(False, 0), (True, 4096)]
        assert not session.tier.capabilities.durable, "the records are in the memory of processes"


def test_a_read_that_fails_while_the_master_is_silent_deletes_nothing(client: Client, master: str) -> None:
    client.answer("0")
    tier = MooncakeTier(master, identity="t", connection=TCP, limits=Limits(threads=1))
    with RemoteSession(tier) as session:
        assert session.tier.get([b"k", b"l"], [1, 2]).wait(30) == [Outcome.FAILED] * 2
        assert client.asked() == [tier.format.name(b"k")], "each answer takes the timeout"
        assert tier.statistics().corrupt == 0


def test_a_master_without_room_declines(client: Client, master: str) -> None:
    """For want of memory, or by the quota of its files or of a tenant. Other refusals are failures."""
    client.answer("0")
    declined, failed = [-200, -1602, -1700], [-1603, -800, -1]
    with RemoteSession(MooncakeTier(master, identity="t", connection=TCP)) as session:
        (client.folder / "stored").write_text(" ".join(map(str, [0, *declined, *failed])))
        names = [f"record {number}" for number in range(7)]
        outcomes = session.tier.store_parts(names, [[np.zeros(8, np.uint8)] for _ in names])
    assert outcomes == [Outcome.DONE, *[Outcome.DECLINED] * 3, *[Outcome.FAILED] * 3]


def test_an_interrupt_while_it_connects_keeps_no_other_thread_from_connecting(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    del client
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        tier = MooncakeTier(f"127.0.0.1:{closed.getsockname()[1]}", identity="m", connection=TCP)
        for number in range(1, 200):
            outcome = interrupt_at(number, tier.connect)
            other = threading.Thread(target=tier.connect)
            other.start()
            other.join()
            if outcome.point is None:
                break
        tier.disconnect()
    assert "calls will try again" in caplog.text
    assert "has not answered yet" not in caplog.text


@pytest.mark.parametrize("hostname", [None, "here.example"])
def test_others_reach_a_client_by_the_address_that_the_master_sees_unless_told(
    client: Client, master: str, hostname: str | None
) -> None:
    client.answer("0")
    connection = MooncakeConnection(protocol="tcp", hostname=hostname)
    with RemoteSession(MooncakeTier(master, identity="t", connection=connection)):
        assert client.hostnames() == {hostname or "127.0.0.1"}


def test_no_message_shows_the_password_of_an_address(
    client: Client, master: str, caplog: pytest.LogCaptureFixture
) -> None:
    client.answer("-1")
    connection = MooncakeConnection(protocol="tcp", metadata_server="redis://:hunter2@127.0.0.1:1")
    assert "hunter2" not in repr(connection)
    with RemoteSession(MooncakeTier(master, identity="t", connection=connection)) as session:
        assert session.tier.exists([b"k"]).wait(30) == [Outcome.FAILED]
    nobody = "etcd://root:hunter2@127.0.0.1:1"
    with RemoteSession(MooncakeTier(nobody, identity="t", connection=TCP, timeout=0.5)):
        pass
    with pytest.raises(ValueError, match="master must be") as found:
        MooncakeTier("etcd://root:hunter2@host", identity="t", connection=TCP)
    assert "redis://***@127.0.0.1:1" in caplog.text
    assert "etcd://***@127.0.0.1:1" in caplog.text
    assert "hunter2" not in caplog.text + str(found.value)


def test_a_child_that_gets_no_answer_is_ended(client: Client) -> None:
    client.answer("none")
    assert not can_set_up({"global_segment_size": "0", "local_hostname": "here"}, 2.0)
    assert client.setups() == [(False, 0)]
