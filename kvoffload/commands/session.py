"""`kvoffload session`: what session files say of themselves, whether they are as saved; from and to mlx-lm."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvoffload import __version__
from kvoffload.internal.checks import reason, shown
from kvoffload.session.mlx_cache import convert
from kvoffload.session.session_file import SessionFile
from kvoffload.terminal.console import Advance, CommandError, Output, counted
from kvoffload.terminal.options import add_command, whole

_MOST_SHOWN = 8192  # characters of a field
_INSPECT = "Prints what the header of a file says: model, form of the blocks, tokens. Reads no blocks."
_VERIFY = "Compares all blocks with their digests. The exit code is 1 if one is damaged, or a file was cut."


def add_parser(commands: Any) -> None:
    session = add_command(
        commands, "session", "files of conversations", "Files that `BlockCache.save` has written.",
        example="session verify chat.kv", usage="ACTION [options]",
    )  # fmt: skip
    actions = session.add_subparsers(title="actions", metavar="ACTION", prog="kvoffload session")
    for name, files, summary, text, run in (
        ("inspect", "FILE", "what a file says of itself", _INSPECT, _inspect),
        ("verify", "FILE ...", "whether files are as they were saved", _VERIFY, _verify),
        ("convert", "FILE OUT", "from and to mlx-lm", "Between session files and prompt caches of mlx-lm.", _convert),
    ):
        example, usage = f"session {name} chat.kv{' chat.safetensors' * (run is _convert)}", f"{files} [options]"
        parser = add_command(actions, name, summary, text, example=example, common="--json", usage=usage)
        several: Any = {_inspect: 1, _verify: "+", _convert: 2}[run]
        parser.add_argument("files", type=Path, nargs=several, metavar="FILE", help=argparse.SUPPRESS)
        parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
        parser.set_defaults(run=run)
    parser.add_argument("--tokens", type=Path, metavar="FILE", help="a JSON list of the ids of the cache's tokens")
    parser.add_argument("--identity", nargs="+", default=[], metavar="NAME=VALUE", help="such as model=llama-3.1-8b")
    parser.add_argument("--block-tokens", type=whole(1), default=16, metavar="N", help="of a block (default 16)")
    parser.add_argument("--salt", default="", metavar="TEXT", help="of the session file's keys")
    session.set_defaults(run=lambda _: session.print_help())


def _inspect(arguments: argparse.Namespace) -> None:
    [path], output = arguments.files, Output(arguments.json)
    try:
        with SessionFile(path) as file:
            contents, whole, sealed, nbytes = file.contents, file.whole, file.sealed, file.nbytes
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from error
    form, blocks = contents.form, contents.blocks
    fields = {
        "bytes": nbytes, "state": "as saved" if sealed else "damaged" if whole == blocks else "cut",
        "tokens": blocks * form.tokens_per_block, "blocks": blocks, "blocks_in_file": whole,
        "block_tokens": form.tokens_per_block, "dtype": form.dtype, "axes": form.axes,
        "groups": [each._asdict() for each in form.groups], "identity": contents.identity, "weights": contents.weights,
        "salted": bool(contents.salt), "producer": contents.producer,
    }  # fmt: skip
    output.result({"file": str(path), **fields})
    lines = [[name.replace("_", " "), shown(value, _MOST_SHOWN)] for name, value in fields.items()]
    output.table(str(path), ("field", "value"), lines, left=("value",))


def _verify(arguments: argparse.Namespace) -> int:
    output, found = Output(arguments.json), []
    for path in arguments.files:
        with output.progress("comparing blocks") as progress:
            found.append(_verified(path, progress))
    output.result({"files": found})
    for each in found:
        whole = f"the first {counted(each['whole_blocks'], 'block')} of {each['blocks']} are whole"
        output.path(f"{each['file']}: {each['problem'] or 'as saved'}{'; ' + whole if each['blocks'] else ''}")
    return max(2 if each["blocks"] is None else int(each["problem"] is not None) for each in found)


def _verified(path: Path, progress: Advance) -> dict[str, Any]:
    """Read the blocks of a file. Returns the findings; `blocks` is None if it is no session file."""
    fields: dict[str, Any] = {"file": str(path), "blocks": None, "whole_blocks": 0, "whole_tokens": 0, "problem": None}
    try:
        with SessionFile(path) as file:
            fields["blocks"], whole, good = file.plan.blocks, 0, True
            while whole < file.whole and good:
                count = min(file.plan.step, file.whole - whole)
                _, same = file.read(whole, count)
                whole, good = whole + same, same == count
                fields |= {"whole_blocks": whole, "whole_tokens": whole * file.contents.form.tokens_per_block}
                progress(whole, file.plan.blocks)
            ends = f"the file ends in block {whole}" if whole < file.plan.blocks else "its end is damaged"
            fields["problem"] = f"block {whole} is damaged" if not good else None if file.sealed else ends
    except (OSError, MemoryError, ValueError) as error:
        fields["problem"] = str(error) or "a block does not fit into memory"
    return fields


def _convert(arguments: argparse.Namespace) -> None:
    output, (source, target) = Output(arguments.json), arguments.files
    try:
        ids = json.loads(arguments.tokens.read_bytes()) if arguments.tokens else None
        given = dict(each.split("=", 1) for each in arguments.identity), arguments.salt, arguments.block_tokens
        tokens = convert(source, target, ids, *given, f"kvoffload {__version__}")
    except Exception as error:  # whatever a stranger's file leads to
        raise CommandError(f"{source} cannot be converted: {reason(error)}") from error
    output.result({"file": str(target), "tokens": tokens})
    output.path(f"{target}: {counted(tokens, 'token')}")
