"""A chat server with an OpenAI-compatible endpoint. Its KV cache goes on in host memory, and on a disk.

python -m chat_server                                                 # SmolLM2-135M: http://127.0.0.1:8000
python -m chat_server --disk /tmp/kv --disk-bytes 2GiB                # conversations survive the process
python -m chat_server --model llama-8b --device-blocks 4096 --pool-bytes 64GiB --batch 32  # random weights
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
import time
from functools import partial
from pathlib import Path

from paged_decode.backend import ONE_ALGORITHM

OF_ENGINE = {  # options, and the names that errors of the engine give them
    "--device-blocks": "device_blocks",
    "--context": "context_tokens",
    "--chunk": "chunk_tokens",
    "--batch": "batch",
    "--pool-bytes": "pool_bytes",
    "--codec": "codec",
    "--disk": "disk",
    "--disk-bytes": "disk_bytes",
    "--share-generated": "share_generated",
}


def size(text: str) -> int:
    """Bytes: 1073741824, 1024M, 1G, 1GiB."""
    short = text.removesuffix("iB")
    unit = "KMGT".find(short[-1:].upper()) + 1
    try:
        return int(float(short[:-1]) * 1024**unit) if unit else int(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"must be bytes, such as 1GiB, 1G (the same) or 1073741824, got {text!r}"
        ) from None


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="chat_server", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="smollm2", help="smollm2 (the default), or with random weights: tiny, llama-1b, llama-8b")
    add("--dtype", choices=("float32", "bfloat16"), help="by default bfloat16 on a GPU, but for smollm2; else float32")
    add("--device-blocks", type=int, default=256, help="blocks of 16 tokens on the device (%(default)s)")
    add("--context", type=int, default=1024, help="tokens of prompt and answer together, at most (%(default)s)")
    add("--batch", type=int, default=8, help="requests that are served at the same time (%(default)s)")
    add("--chunk", type=int, default=64, help="tokens of a prompt that a step computes (%(default)s)")
    add("--pool-bytes", type=size, default="1GiB", help="host memory for blocks (%(default)s)")
    add("--codec", choices=("raw", "bf16-12"), default="raw", help="of the pool and the disk; bf16-12 needs bfloat16")
    add("--disk", type=Path, help="a file for blocks; with --disk-bytes")
    add("--disk-bytes", type=size, default=0, help="its size")
    add("--weights", type=Path, help="a folder with GGUF files of other weights, which POST /weights names")
    add("--no-offload", action="store_true", help="only the cache on the device")
    add("--share-generated", action="store_true", help="share blocks of answers, too: see engine.py")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    chosen = parser.parse_args()
    if (chosen.disk is None) != (chosen.disk_bytes == 0):
        parser.error("--disk and --disk-bytes go together: where the file is, and its size")
    if chosen.disk is not None and chosen.no_offload:
        parser.error("--no-offload has nothing below the device: leave it out, or --disk")
    return chosen


def refuse(said: object) -> int:
    print(f"chat_server: {said}", file=sys.stderr)
    return 2


def main() -> int:
    chosen, begun = options(), time.monotonic()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_ALGORITHM}"

    def says(what: str) -> None:
        print(f"{time.monotonic() - begun:5.1f} s: {what}", flush=True)

    try:  # now, not after the model has been loaded; clients that come early wait
        listening = socket.create_server((chosen.host, chosen.port))
    except (OSError, OverflowError) as error:
        return refuse(f"cannot listen on --host {chosen.host} --port {chosen.port}: {error}")
    with listening:
        says("import JAX")
        try:
            import uvicorn

            from chat_server import llama, models
            from chat_server.engine import Engine, EngineOptions
            from chat_server.server import ChatServer
            from chat_server.tokenizer import Tokenizer
            from kvoffload import KVOffloadError

            file = models.open_file()
        except ImportError as error:
            return refuse(f"{error}: install what examples/chat_server/README.md says")
        if chosen.model not in llama.GEOMETRIES:
            return refuse(f"--model must be one of {list(llama.GEOMETRIES)}, got {chosen.model}")
        dtype = chosen.dtype or models.default_dtype(chosen.model)
        says(f"load {chosen.model}")
        model = models.load(chosen.model, dtype)
        given = {name: getattr(chosen, option[2:].replace("-", "_")) for option, name in OF_ENGINE.items()}
        try:
            engine_options = EngineOptions(identity=model.identity, dtype=dtype, offload=not chosen.no_offload, **given)
            engine = Engine(model.size, model.weights, engine_options)
        except (KVOffloadError, ValueError, OSError) as error:
            options_of = {name: option for option, name in OF_ENGINE.items()}
            return refuse(re.sub(r"^\w+|\b\w+_\w+\b", lambda word: options_of.get(word[0], word[0]), str(error)))
        with engine:
            says("compile a step for prompts, and one for answers")
            engine.warm_up()
            says(f"{chosen.model} on http://{chosen.host}:{listening.getsockname()[1]}")
            load = partial(models.other_weights, chosen.model, dtype=dtype, folder=chosen.weights)
            app = ChatServer(engine, Tokenizer(file.metadata), chosen.model, load).app
            limits = {"limit_concurrency": 1024, "timeout_graceful_shutdown": 5}
            try:
                uvicorn.Server(uvicorn.Config(app, log_level="warning", **limits)).run([listening])
            except KeyboardInterrupt:
                pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
