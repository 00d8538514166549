"""SessionFolder: the session files of a folder as a tier that is only read: prompts that are computed once."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

import numpy as np

from kvoffload.cache.keys import chain_keys
from kvoffload.cache.tiering.tier import Outcome, TierCapabilities
from kvoffload.cache.weights import tag_of
from kvoffload.driver import address_of
from kvoffload.errors import CapabilityError, LayoutError
from kvoffload.internal.checks import reason, shown
from kvoffload.internal.log import LOGGER
from kvoffload.internal.nesting import new_thread
from kvoffload.layout.layout import KVLayout, ShardedLayout
from kvoffload.session.saving import Terms
from kvoffload.session.session_file import SessionFile
from kvoffload.session.whole_blocks import WholeBlocks
from kvoffload.tiers.threaded import Origin, Rows, ThreadedTier

LOOK_SECONDS = 1.0  # between looks at the folder


class SessionFolder(ThreadedTier):
    """The files in a folder that `BlockCache.save` has written, as a tier that is only read. Any number of processes
    may have it over one folder; usable from any thread.

    A key is found in whichever file has it, of the weights that the file was saved with. Every block is compared with
    its digest before its key is DONE; one that the layout's codec cannot hold is MISSING. A thread looks once a second
    whether files have come, changed or gone. What is no session file, or does not fit, is left out, and logged once.
    Names that begin with a dot are not looked at, nor folders. Write files elsewhere in the file system and rename
    them, as `save` does. Files stay closed but while blocks are read. Digests are no signatures: whoever can write to
    the folder decides what the model has seen.

    Puts are DECLINED. Removals are FAILED if the folder has one of the keys: delete its files.

    Args:
        path: the folder. `~` is your home.
        layout: of the engine whose slots the cache has, `engine.layout`.
        salt, identity, extra: as given to `BlockCache.save`. Files with others do not fit.
        name: for metrics and messages.

    Raises:
        TypeError, ValueError: an argument is wrong.
        LayoutError: the layout has no fingerprint, or not what `save` needs; from `attach`: the cache has another one.
        OSError: from `attach`, which reads all headers: the folder cannot be read.
    """

    bytes_per_call = 32 << 20  # for each call a file is opened, and the digests and keys of all its blocks are read

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        layout: KVLayout | ShardedLayout,
        salt: str,
        identity: Mapping[str, str],
        extra: bytes = b"",
        name: str = "sessions",
    ) -> None:
        super().__init__()
        chain_keys((), layout=layout, salt=salt, extra=extra)  # raises for what is no layout, salt or extra
        self._terms = Terms.checked(salt, extra, identity)
        self._layout, self._whole = layout, WholeBlocks(layout, ())
        self.path, self.name = Path(path).expanduser().absolute(), name
        self.capabilities = TierCapabilities(durable=True, shared=True, local_index=True)
        self._files: dict[str, tuple[tuple[int, int, int], list[bytes]]] = {}  # inode, time, size; keys
        self._index: dict[bytes, list[str]] = {}  # names of files that have the key, the first first
        self._ended = threading.Event()
        self._watcher = new_thread(f"kvoffload-{name}-folder", self._watch)

    # for ThreadedTier ---------------------------------------------------------------------------------------------

    def start(self, layout: bytes | None) -> None:
        if layout != self._layout.fingerprint:
            raise LayoutError(f"layout of {self!r} must be that of the cache above it: give it engine.layout")
        slots = [pool.reshape(len(pool) * self._layout.num_groups, -1) for pool in self.pools]
        self._whole = WholeBlocks(self._layout, slots)
        self._look()
        self._watcher.start()

    def release(self) -> None:
        self._ended.set()
        self._watcher.join()
        self._whole = WholeBlocks(self._layout, ())

    def read_records(self, keys: Sequence[bytes], rows: Sequence[Rows]) -> list[Outcome]:
        begin, width = address_of(self.pools[0]), self.pools[0].shape[1]
        entries = {key: (address_of(row) - begin) // width for key, (row, *_) in zip(keys, rows, strict=True)}
        outcomes = dict.fromkeys(keys, Outcome.MISSING)
        for names, group in groupby(keys, self._index.get):
            try:
                if names:
                    with SessionFile(self.path / names[0]) as file:
                        self._read(file, {key: entries[key] for key in group}, outcomes)
            except (FileNotFoundError, LayoutError, ValueError):  # it has gone, or is another one
                pass
        return list(outcomes.values())

    def write_records(self, keys: Sequence[bytes], rows: Sequence[Rows], origin: Origin) -> list[Outcome]:  # noqa: ARG002
        return [Outcome.DECLINED] * len(keys)

    def have_records(self, keys: Sequence[bytes]) -> list[bool]:
        return list(map(self._index.__contains__, keys))

    def remove_records(self, keys: Sequence[bytes]) -> list[bool]:
        if any(self.have_records(keys)):
            raise CapabilityError(f"{self.path} is only read: move files out of it")
        return [False] * len(keys)

    def remove_all(self) -> None:
        self.remove_records(list(self._index))

    def num_records(self) -> int:
        return len(self._index)

    # reading ------------------------------------------------------------------------------------------------------

    def _read(self, file: SessionFile, entries: dict[bytes, int], outcomes: dict[bytes, Outcome]) -> None:
        """Read the blocks of keys into entries, neighbours together, and set the outcomes of those that came."""
        factor, groups = self._layout.blocks_per_slot, self._layout.num_groups
        places = {key: at for at, key in enumerate(self._keys_of(file)) if key in entries}
        for _, run in groupby(enumerate(places.items()), lambda each: each[1][1] - each[0]):
            keys = [key for _, (key, _) in run]
            blocks, good = file.read(places[keys[0]] * factor, len(keys) * factor)
            count = good // factor
            rows = np.array([entries[key] for key in keys[:count]], dtype=np.int64) * groups
            fits = np.ones(count, dtype=bool)
            for group in range(groups if count else 0):
                fits &= self._whole.scatter(group, rows + group, blocks[group][: count * factor])
            outcomes |= {key: Outcome.DONE for key, fit in zip(keys, fits, strict=False) if fit}
            if count < len(keys):
                self.count_corrupt()
                self.warn(ValueError(f"block {places[keys[0]] * factor + good} of {shown(file.path)} is damaged"))
            for key in keys[: count + 1]:
                if outcomes[key] is not Outcome.DONE:  # nor will it be, from this file
                    others = self._index.pop(key, [])[1:]
                    self._index |= {key: others} if others else {}

    def _keys_of(self, file: SessionFile) -> list[bytes]:
        """Return the keys of the blocks in a file. LayoutError, ValueError: it does not fit."""
        weights, terms = file.contents.weights, self._terms
        terms.check(file, self._whole.form, weights)
        keys = chain_keys(file.tokens, layout=self._layout, salt=terms.salt, extra=terms.extra)
        return [tag_of(weights) + key for key in keys]

    # looking ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._guarded(self._look, lambda _: None)

    def _look(self) -> None:
        """Take note of files that have come, changed or gone. Those that have not are not opened."""
        files = {}
        with os.scandir(self.path) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                with suppress(OSError):  # gone, or cannot be opened now: the next look tries again
                    if entry.name[0] != "." and entry.is_file():
                        state = entry.stat()
                        version, known = (state.st_ino, state.st_mtime_ns, state.st_size), self._files.get(entry.name)
                        same = known is not None and known[0] == version
                        files[entry.name] = known if known and same else (version, self._keys_in(entry.path))
        if files != self._files:
            index: dict[bytes, list[str]] = {}
            for name, (_, keys) in files.items():
                for key in keys:
                    index.setdefault(key, []).append(name)
            self._files, self._index = files, index

    def _keys_in(self, path: str) -> list[bytes]:
        try:
            with SessionFile(path) as file:
                return self._keys_of(file)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001  # whatever a stranger's file leads to
            LOGGER.warning("tier %s leaves a file out: %s", self.name, reason(error))
            return []
