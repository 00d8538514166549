"""`doctor --path`: what is found of folders, and that nothing is left in them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from benching import run_json

from kvoffload.commands import findings, folders, main
from kvoffload.tiers.files import OpenFile

DOCTOR = ("doctor", "--backend", "simulated")


@pytest.fixture(autouse=True)
def small_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MOST_BYTES", 32 << 20)


def found(folder: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Texts, with status and remedy."""
    return {each.text: (each.status, each.remedy) for each in findings.of_folders({"folders": [folder]})}


def test_a_folder_is_tried_and_left_as_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fields = run_json(capsys, *DOCTOR, "--path", str(tmp_path))
    (folder,) = fields["folders"]
    assert folder["folder"] == str(tmp_path)
    assert folder["problem"] is None
    assert folder["mode"] == f"{tmp_path.stat().st_mode & 0o777:o}"
    assert folder["free_bytes"] > 0
    assert 0 < folder["probe_bytes"] <= 32 << 20
    assert folder["write_gb_per_s"] > 0
    assert folder["read_gb_per_s"] > 0
    assert list(tmp_path.iterdir()) == []
    monkeypatch.chdir(tmp_path)
    assert main([*DOCTOR, "--path", "."]) == 0
    assert "\nfolders\n  ok    .: " in capsys.readouterr().out


def test_without_a_path_no_folder_is_tried(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "probe", lambda _: pytest.fail("a folder was tried"))
    assert run_json(capsys, *DOCTOR)["folders"] == []


@pytest.mark.parametrize("kind", ["missing", "link", "open to all", "file"])
def test_a_folder_that_a_tier_refuses_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    path = tmp_path / "folder"
    if kind == "file":
        path.write_bytes(b"")
    elif kind == "link":
        path.symlink_to(tmp_path)
    elif kind == "open to all":
        path.mkdir()
        path.chmod(0o777)
    fields = run_json(capsys, *DOCTOR, "--path", str(path), code=1)
    ((text, (status, remedy)),) = found(fields["folders"][0]).items()
    said = {"missing": "No such file", "link": "symbolic link", "open to all": "every user may write", "file": "Not a"}
    assert said[kind] in text
    assert status == "fail"
    assert f"{path}: {remedy}" in fields["advice"]
    remedies = {"missing": f"make it: mkdir -p {path}", "file": "give the folder of the file"}
    assert remedy == remedies.get(kind, "give this user's own folder, no symbolic link, that other users cannot write")
    assert fields["folders"][0]["write_gb_per_s"] is None


def test_a_folder_that_is_mounted_for_reading_alone_says_so() -> None:
    folder = {"folder": "/mounted", "problem": os.strerror(errno.EROFS)}
    (finding,) = findings.of_folders({"folders": [folder]})
    assert finding.remedy == "mount it for writing, or give another folder"


def test_a_folder_in_the_home_of_a_user_is_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A shell expands neither `--path=~/disk` nor a path in quotes."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "disk").mkdir()
    (folder,) = run_json(capsys, *DOCTOR, "--path=~/disk")["folders"]
    assert (folder["folder"], folder["problem"]) == (str(tmp_path / "disk"), None)


def test_drawbacks_are_warnings_with_remedies(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(OpenFile, "try_direct", lambda *_: None)
    buffered = folders.probe(tmp_path) | {"file_system": "ext4", "free_bytes": 1 << 40}
    assert buffered["direct_io"] is False
    assert buffered["write_gb_per_s"] > 0
    assert found(buffered)["no direct I/O"][0] == "warn"
    good = buffered | {"direct_io": True}
    assert [status for status, _ in found(good).values()] == ["ok"]
    for change, said in (
        ({"file_system": "tmpfs", "direct_io": False}, "tmpfs is host memory, not a disk"),
        ({"file_system": "nfs4"}, "nfs4 is a network file system"),
        ({"free_bytes": 1 << 30}, "little space is free"),
    ):
        (first, _), (text, (status, remedy)) = found(good | change).items()
        assert (text, status) == (said, "warn")
        assert remedy
        assert first.startswith(str(change.get("file_system", "ext4")))
    capsys.readouterr()


def test_a_full_disk_is_not_written_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 99, 99, 99, 0, 0, 0, 0, 255)))
    folder = folders.probe(tmp_path)
    assert (folder["problem"], folder["free_bytes"], folder["probe_bytes"]) == (None, 99 * 4096, 0)
    assert "little space is free" in found(folder)


def test_the_file_system_is_that_of_the_nearest_mount(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mounts, folder = tmp_path / "mountinfo", tmp_path / "a b"
    folder.mkdir()
    escaped = str(folder).replace(" ", "\\040")
    mounts.write_text(
        "22 1 254:0 / / rw - ext4 /dev/vda rw\n"
        f"23 22 0:5 / {escaped} rw shared:7 - xfs /dev/vdb rw\n"
        f"24 22 0:6 / {tmp_path}/a rw - tmpfs none rw\n"
    )
    monkeypatch.setattr(folders, "MOUNTS", mounts)
    assert folders.file_system(folder) == "xfs"
    assert folders.file_system(tmp_path) == "ext4"
    monkeypatch.setattr(folders, "MOUNTS", tmp_path / "none")
    assert folders.file_system(folder) is None
