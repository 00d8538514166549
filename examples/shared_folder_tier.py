"""A tier of your own over a store that several machines share; here the store is a folder on a shared file system.

`RemoteTier` forms names, packs headers, and verifies every record; your subclass reads and writes parts under names.
Run it with a folder, or without one to check it in a temporary folder.

    python examples/shared_folder_tier.py /mnt/shared/kv

To use it as `kvoffload.tiers.load_tier("shared-folder", ...)`, write into the pyproject.toml of your package:

    [project.entry-points."kvoffload.tiers"]
    shared-folder = "your_package:SharedFolderTier"
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffload.testing import check_tier
from kvoffload.tiers import Limits, Outcome, RemoteTier

Parts = list[npt.NDArray[np.uint8]]
"""One record: the header, then the range of each device; one-dimensional arrays."""


class SharedFolderTier(RemoteTier):
    """One file for each record: header, then the range of each device. A file under its final name is complete.

    Args:
        path: a folder that all machines have mounted. Its users can read and replace records.
        identity: see `RemoteTier`.
    """

    def __init__(self, path: str | Path, *, identity: str, limits: Limits | None = None) -> None:
        super().__init__(identity=identity, name="shared-folder", durable=True, limits=limits)
        self.path = Path(path)

    def connect(self) -> None:
        (self.path / self.format.folder).mkdir(parents=True, exist_ok=True)

    def disconnect(self) -> None:
        pass

    def fetch_parts(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        return [self._fetch(name, record) for name, record in zip(names, parts, strict=True)]

    def store_parts(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        # Each thread writes under its own name first, so that two machines can write one record at a time.
        own = f".{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
        for name, record in zip(names, parts, strict=True):
            part = self.path / (name + own)
            with open(part, "wb") as file:
                for each in record:
                    file.write(each.data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self.path / name)  # all or nothing
        return [Outcome.DONE] * len(names)

    def have_names(self, names: Sequence[str]) -> list[bool]:
        return [(self.path / name).exists() for name in names]

    def delete_names(self, names: Sequence[str]) -> list[bool]:
        return [self._delete(self.path / name) for name in names]

    def delete_folder(self, folder: str) -> None:
        for file in (self.path / folder).iterdir():
            self._delete(file)

    def _fetch(self, name: str, parts: Parts) -> Outcome:
        try:
            with open(self.path / name, "rb", buffering=0) as file:
                whole = os.preadv(file.fileno(), [each.data for each in parts], 0) == sum(each.nbytes for each in parts)
        except FileNotFoundError:
            return Outcome.MISSING
        return Outcome.DONE if whole else self.reject(name)

    @staticmethod
    def _delete(file: Path) -> bool:
        try:
            file.unlink()
        except FileNotFoundError:
            return False
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # a record that was removed must not come back after a crash
        finally:
            os.close(folder)
        return True


def main() -> None:
    given = sys.argv[1] if len(sys.argv) > 1 else None
    path = given or tempfile.mkdtemp()
    try:
        for pools in (1, 2):
            checks = check_tier(lambda: SharedFolderTier(path, identity="a check"), pools=pools)
            print(f"{len(checks)} checks passed with {pools} device{'s' if pools > 1 else ''}")
    finally:
        if given is None:
            shutil.rmtree(path)


if __name__ == "__main__":
    main()
