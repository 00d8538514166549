"""The format of a session file, which any reader of safetensors opens. docs/session-format.md specifies it.

    | 8: bytes of the header | header: JSON, spaces to a page | tokens | digests | padding to a page | segments | seal |

A segment holds whole blocks of one group, one after the other, so that a file that was cut has its leading blocks. The
digest of a block is over the header, all tokens up to its last one, its number, and its bytes in all groups. So blocks,
tokens and what the file says of them are only valid together.

All sizes and places follow from the `Contents`, which are a part of the header. A reader makes the header anew from
them and compares the two: no offset of a file is ever used.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvoffload.errors import SessionFileError
from kvoffload.internal.checks import shown
from kvoffload.internal.teardown import Closing
from kvoffload.internal.types import Int64Array, UInt8Array
from kvoffload.layout.dtypes import element_bytes
from kvoffload.session.whole_blocks import MOST_AXES, BlockForm, Blocks, GroupForm, pages
from kvoffload.tiers.files import PAGE, SYSTEM, OpenFile

FORMAT, VERSION = "kvoffload session", "1"
MOST_HEADER = 16 << 20
MOST_CONTENTS = 64 << 10  # bytes of the part of the header that is read
MOST_BLOCKS = 1 << 32
MOST_TOKENS = 1 << 24  # of all blocks together: what a sparse file can have allocated
SEGMENT_BYTES = 16 << 20  # of all groups together, where a block is smaller
DIGEST_BYTES, _SEAL_BYTES = 16, 32
_BEGIN = b'{"__metadata__":'
_LEAST_ENTRY = 50  # bytes of a tensor's entry in the header
_TYPES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    **{f"{sign}int{bits}": f"{letter}{bits}" for sign, letter in (("u", "U"), ("", "I")) for bits in (8, 16, 32, 64)},
}


class Contents(NamedTuple):
    """What a file says of its blocks.

    Attributes:
        form: of its blocks.
        blocks: how many.
        identity: what the bytes depend on, by name: the model, its revision, and so on.
        weights: the name of the weights in use when the file was saved.
        salt: a digest of salt and extra of the keys, keyed by the first block's tokens; "": there were none.
        producer: program and version.
    """

    form: BlockForm
    blocks: int
    identity: dict[str, str]
    weights: str
    salt: str
    producer: str

    def metadata(self) -> dict[str, str]:
        """Return the strings that stand for it in the header."""
        groups = [{"kind": "full", "planes": group.planes, "shape": group.shape} for group in self.form.groups]
        return {
            "format": FORMAT,
            "version": VERSION,
            "producer": self.producer,
            "identity": _json(dict(sorted(self.identity.items()))),
            "weights": self.weights,
            "salt": self.salt,
            "dtype": self.form.dtype,
            "axes": _json(self.form.axes),
            "block_tokens": str(self.form.tokens_per_block),
            "groups": _json(groups),
            "blocks": str(self.blocks),
        }

    @classmethod
    def of(cls, metadata: dict[str, str]) -> Contents:
        """Read what `metadata` returns. ValueError, TypeError, KeyError or LayoutError: it is nothing like that."""
        groups = [
            GroupForm(_count(each["planes"]), tuple(map(_count, each["shape"])))
            for each in json.loads(metadata["groups"])
        ]
        axes = tuple(map(str, json.loads(metadata["axes"])))
        form = BlockForm(metadata["dtype"], _count(int(metadata["block_tokens"])), axes, tuple(groups))
        identity = {str(name): str(value) for name, value in json.loads(metadata["identity"]).items()}
        blocks = _count(int(metadata["blocks"]))
        return cls(form, blocks, identity, metadata["weights"], metadata["salt"], metadata["producer"])


class Plan:
    """Where everything lies in a file of these contents: sizes and places in bytes from its begin.

    Args:
        most: segments of all groups; None: no limit. ValueError: there are more, or a reader would refuse the file.

    Attributes:
        header: its first bytes, whole pages.
        tokens_at, digests_at, blocks_at, seal_at, nbytes: places, and the size of the file.
        block_bytes: of each group.
        step: blocks of a segment; the last one may have fewer.
    """

    def __init__(self, contents: Contents, most: int | None = None) -> None:
        self.contents = contents
        form, self.blocks = contents.form, contents.blocks
        self.block_bytes = [form.block_bytes(group) for group in range(len(form.groups))]
        self.step = max(1, SEGMENT_BYTES // sum(self.block_bytes))
        tokens, digests = 4 * form.tokens_per_block * self.blocks, DIGEST_BYTES * self.blocks
        padding = -(tokens + digests) % PAGE
        segments = -(-self.blocks // self.step) * len(self.block_bytes)
        if (most is not None and segments > most) or tokens > 4 * MOST_TOKENS:
            raise ValueError(f"a session file has at most {MOST_TOKENS} tokens, got {tokens // 4}, {segments} segments")
        self.header = self._header(tokens, digests, padding)
        if len(self.header) > MOST_HEADER or len(_json(contents.metadata())) > MOST_CONTENTS - PAGE:
            raise ValueError("the header of a session file would be too long: shorten identity, or save fewer tokens")
        if len(form.axes) > MOST_AXES or Contents.of(json.loads(_json(contents.metadata()))) != contents:
            raise ValueError(f"identity and weights must be texts that JSON keeps as they are, got {shown(contents)}")
        self.tokens_at = len(self.header)
        self.digests_at = self.tokens_at + tokens
        self.blocks_at = self.digests_at + digests + padding
        self.seal_at = self.blocks_at + self.blocks * sum(self.block_bytes)
        self.nbytes = self.seal_at + _SEAL_BYTES
        self._root = blake2b(self.header, digest_size=DIGEST_BYTES).digest()

    def runs(self, first: int, count: int) -> list[tuple[int, int]]:
        """Cut blocks at the ends of segments: pairs of a first block and how many."""
        stop, begins = first + count, range(first - first % self.step, first + count, self.step)
        return [(max(first, at), min(stop, at + self.step) - max(first, at)) for at in begins]

    def place(self, block: int, group: int) -> int:
        """Return where the bytes of a block begin. Those of the next ones in its segment follow."""
        begin = block - block % self.step
        length = min(self.step, self.blocks - begin)
        before = length * sum(self.block_bytes[:group]) + (block - begin) * self.block_bytes[group]
        return self.blocks_at + begin * sum(self.block_bytes) + before

    def whole(self, nbytes: int) -> int:
        """Return how many leading blocks lie in the first bytes of the file."""
        last, width = len(self.block_bytes) - 1, self.block_bytes[-1]  # a block's bytes in the last group come last
        return bisect_right(range(self.blocks), nbytes - width, key=lambda block: self.place(block, last))

    def digests_of(self, tokens: Int64Array, first: int, groups: Sequence[UInt8Array]) -> UInt8Array:
        """Return the digests of blocks whose bytes are the rows of `groups`, from block `first` on: (blocks, bytes)."""
        import xxhash

        per_block = self.contents.form.tokens_per_block
        found = bytearray()
        upto = xxhash.xxh3_128(self._root + tokens[: first * per_block].astype("<u4").tobytes())
        for row, block in enumerate(range(first, first + len(groups[0]))):
            upto.update(tokens[block * per_block : (block + 1) * per_block].astype("<u4").tobytes())
            state = upto.copy()
            state.update(struct.pack("<Q", block))
            for each in groups:
                state.update(each[row])
            found += state.digest()
        return np.frombuffer(found, np.uint8).reshape(-1, DIGEST_BYTES)

    def move(self, call: Callable[[Sequence[memoryview], int], bool], first: int, groups: Sequence[UInt8Array]) -> bool:
        """Read or write blocks, the rows of `groups`, from block `first` on. Returns False if the file ends before."""
        for begin, count in self.runs(first, len(groups[0])):
            for group, blocks in enumerate(groups):
                rows = blocks[begin - first : begin - first + count]
                if not call([rows.reshape(-1).data], self.place(begin, group)):
                    return False
        return True

    def seal(self, tokens: bytes, digests: bytes) -> bytes:
        return blake2b(self.header + tokens + digests, digest_size=_SEAL_BYTES).digest()

    def _header(self, tokens: int, digests: int, padding: int) -> bytes:
        form = self.contents.form
        kind, width = _TYPES.get(form.dtype, ""), element_bytes(form.dtype)
        tensors: list[tuple[str, str, Sequence[int], int]] = [
            ("tokens", "U32", (self.blocks, form.tokens_per_block), tokens),
            ("digests", "U8", (self.blocks, DIGEST_BYTES), digests),
            ("padding", "U8", (padding,), padding),
        ]
        for first, count in self.runs(0, self.blocks):
            for group, (planes, shape) in enumerate(form.groups):
                extents = (count, planes, *shape) if kind else (count, planes, *shape, width)
                tensors.append((f"blocks.{group}.{first}", kind or "U8", extents, count * self.block_bytes[group]))
        tensors.append(("seal", "U8", (_SEAL_BYTES,), _SEAL_BYTES))
        entries, end = dict[str, Any](__metadata__=self.contents.metadata()), 0
        for name, dtype, sizes, nbytes in tensors:
            entries[name] = {"dtype": dtype, "shape": sizes, "data_offsets": [end, end := end + nbytes]}
        text = _json(entries).encode()
        text += b" " * (-(8 + len(text)) % PAGE)
        return struct.pack("<Q", len(text)) + text


class SessionFile(Closing):
    """A session file, open to be read. Its bytes are a stranger's: nothing is allocated that does not lie in the file.

    Attributes:
        contents: what it says.
        whole: how many leading blocks lie in it, all unless it was cut. Their bytes were not looked at.
        tokens: int64, those of the whole blocks.
        sealed: whether header, tokens and digests are as they were saved.

    Raises:
        SessionFileError: it is none, its header is damaged, or of a newer version.
        OSError: it cannot be opened or read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._file = OpenFile(self.path, SYSTEM, os.O_RDONLY | os.O_NONBLOCK)
        try:
            self.nbytes = self._file.nbytes
            self.plan = plan = _read_plan(self._file, self.nbytes)
            self.contents = plan.contents
            self.whole = plan.whole(self.nbytes)
            tokens, digests = self._read(plan.tokens_at, plan.digests_at), self._read(plan.digests_at, plan.seal_at, 16)
            per_block = plan.contents.form.tokens_per_block
            self.tokens = tokens[: 4 * self.whole * per_block].view("<u4").astype(np.int64)
            self._digests = digests
            seal = plan.seal(tokens.tobytes(), digests.tobytes())
            self.sealed = self.nbytes == plan.nbytes and self._read(plan.seal_at, plan.nbytes).tobytes() == seal
            self._file.try_direct(plan.blocks_at)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def read(self, first: int, count: int) -> tuple[list[Blocks], int]:
        """Read blocks, all below `whole`. Returns those of each group, and how many leading ones are as saved."""
        plan, form = self.plan, self.contents.form
        groups = [pages(count * width).reshape(count, width) for width in plan.block_bytes]
        if not plan.move(self._file.read_payload, first, groups):
            return [each[:0] for each in groups], 0
        digests = self._digests.reshape(-1, DIGEST_BYTES)[first : first + count]
        wrong = (plan.digests_of(self.tokens, first, groups) != digests).any(axis=1)
        shapes = [(count, group.planes, *group.shape) for group in form.groups]
        blocks = [
            each.reshape(-1).view(form.element).reshape(shape) for each, shape in zip(groups, shapes, strict=True)
        ]
        return blocks, int(wrong.argmax()) if wrong.any() else count

    def _read(self, begin: int, end: int, most: int = 0) -> UInt8Array:
        """Return the bytes between two places, as far as they lie in the file; with `most`, so many for each block."""
        end = min(end, self.nbytes, begin + most * self.plan.blocks if most else end)
        found = np.empty(max(0, end - begin), dtype=np.uint8)
        if not self._file.read([found.data], begin):
            raise SessionFileError(f"{shown(self.path)} has become shorter while it was read")
        return found


def read_tokens(path: str | os.PathLike[str]) -> list[int]:
    """Return the token ids of the blocks in a session file, as far as the file has them whole; of a cut one the leading
    ones. It reads no blocks, and does not compare tokens with digests, as `BlockCache.restore` does.

    Raises:
        SessionFileError: it is no session file, its header is damaged, or it is of a newer version.
        OSError: it cannot be opened or read.
    """
    with SessionFile(path) as file:
        return list(map(int, file.tokens))


class SessionWriter(Closing):
    """A session file that is written beside its path, and renamed when it is finished. Else it is gone at the end.

    Raises:
        OSError: it cannot be written; also from `put` and `finish`.
    """

    def __init__(self, path: str | os.PathLike[str], plan: Plan, tokens: Int64Array) -> None:
        self.plan, self.tokens = plan, tokens
        self._path = Path(os.fsdecode(path)).absolute()  # the working folder may change
        if self._path.exists() and not self._path.is_file():
            raise FileExistsError(errno.EEXIST, "It is no regular file, and would be replaced by one", str(self._path))
        name = os.fsdecode(os.fsencode(self._path.name)[:64])  # a name has at most 255 bytes
        self._part = self._path.with_name(f".{name}.{secrets.token_hex(8)}.part")
        self._process = os.getpid()
        self._digests = np.zeros((plan.blocks, DIGEST_BYTES), dtype=np.uint8)
        self._file: OpenFile | None = None
        try:
            self._file = OpenFile(os.fspath(self._part), SYSTEM, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            SYSTEM.fallocate(self._file.descriptor, plan.nbytes)
            if not any(width % PAGE for width in plan.block_bytes):  # no page is written both ways
                self._file.try_direct(plan.blocks_at)
        except BaseException:
            self.close()
            raise

    def put(self, first: int, blocks: Sequence[Blocks]) -> None:
        """Write blocks of all groups, from block `first` on. Any thread may, for other blocks."""
        assert self._file is not None
        groups = [each.reshape(len(each), -1).view(np.uint8) for each in blocks]
        self.plan.move(self._file.write_payload, first, groups)
        self._digests[first : first + len(groups[0])] = self.plan.digests_of(self.tokens, first, groups)

    def finish(self) -> None:
        """Write the rest, and give the file its name once it is durable."""
        assert self._file is not None
        tokens = self.tokens.astype("<u4").tobytes()
        seal = self.plan.seal(tokens, self._digests.tobytes())
        self._file.write([memoryview(self.plan.header), memoryview(tokens), self._digests.reshape(-1).data], 0)
        self._file.write([memoryview(seal)], self.plan.seal_at)
        self._file.sync()
        os.replace(self._part, self._path)
        folder = OpenFile(os.fspath(self._path.parent), SYSTEM, os.O_RDONLY | os.O_DIRECTORY)
        try:
            SYSTEM.fsync(folder.descriptor)
        finally:
            folder.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._process == os.getpid():
            with suppress(FileNotFoundError, ValueError):  # of a name that is none
                self._part.unlink()

    def __del__(self) -> None:  # an interrupt came before `__enter__`, or in `close`
        if hasattr(self, "_file"):
            self.close()


def _read_plan(file: OpenFile, nbytes: int) -> Plan:
    def refused(why: str) -> SessionFileError:
        return SessionFileError(f"{shown(file.path)} is no session file that this release reads: {why}")

    if not stat.S_ISREG(os.fstat(file.descriptor).st_mode):
        raise refused("it is no file")
    head = np.zeros(min(8 + MOST_CONTENTS, nbytes), dtype=np.uint8)
    if nbytes < PAGE or not file.read([head.data], 0):
        raise refused("it is shorter than a header")
    (length,) = struct.unpack_from("<Q", head.data)
    if not 0 < length <= min(MOST_HEADER, nbytes - 8):
        raise refused("its first 8 bytes are no length of a header")
    text = head[8 : 8 + length].tobytes()
    if not text.startswith(_BEGIN):
        raise refused("its header begins otherwise")
    try:
        metadata, _ = json.JSONDecoder().raw_decode(text[len(_BEGIN) :].decode("ascii"))
        if metadata["format"] != FORMAT or metadata["version"] != VERSION:
            raise refused(f"it is {shown(metadata['format'])}, version {shown(metadata['version'])}")
        plan = Plan(Contents.of(metadata), most=length // _LEAST_ENTRY)
    except SessionFileError:
        raise
    except Exception as error:  # noqa: BLE001  # a stranger's numbers, and texts that numpy takes for a dtype
        raise refused(f"what its header says is damaged ({type(error).__name__})") from None
    header = np.empty(8 + length, dtype=np.uint8)
    if not file.read([header.data], 0) or header.tobytes() != plan.header:
        raise refused("its header is damaged")
    if nbytes > plan.nbytes:
        raise refused(f"it has {nbytes} bytes, and should have {plan.nbytes}")
    return plan


def _count(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MOST_BLOCKS:
        raise ValueError(value)
    return value


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
