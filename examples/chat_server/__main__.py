"""A chat server with an OpenAI-compatible endpoint. Its KV cache goes on in host memory, and on a disk.

python -m chat_server                                                 # SmolLM2-135M: http://127.0.0.1:8000
python -m chat_server --disk /tmp/kv --disk-bytes 2G                  # conversations survive the process
python -m chat_server --model llama-8b --device-blocks 4096 --pool-bytes 64G --batch 32    # random weights
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from paged_decode.backend import ONE_ALGORITHM


def size(text: str) -> int:
    """Bytes: 1073741824, 1024M, 1G."""
    unit = "KMGT".find(text[-1:].upper()) + 1
    return int(float(text[:-1]) * 1024**unit) if unit else int(text)


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
    add("--pool-bytes", type=size, default="1G", help="host memory for blocks (%(default)s)")
    add("--codec", choices=("raw", "bf16-12"), default="raw", help="of the pool and the disk; bf16-12 needs bfloat16")
    add("--disk", type=Path, help="a file for blocks; with --disk-bytes")
    add("--disk-bytes", type=size, default=0, help="its size")
    add("--no-offload", action="store_true", help="only the cache on the device")
    add("--share-generated", action="store_true", help="share blocks of answers, too: see engine.py")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    return parser.parse_args()


def main() -> int:
    chosen = options()
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_ALGORITHM}"
    try:
        import uvicorn

        from chat_server import llama, models
        from chat_server.engine import Engine, EngineOptions
        from chat_server.server import ChatServer
        from chat_server.tokenizer import Tokenizer

        file = models.open_file()
    except ImportError as error:
        print(f"{error}: install what examples/chat_server/README.md says", file=sys.stderr)
        return 2
    if chosen.model not in llama.GEOMETRIES:
        print(f"--model must be one of {list(llama.GEOMETRIES)}, got {chosen.model}", file=sys.stderr)
        return 2
    dtype = chosen.dtype or models.default_dtype(chosen.model)
    model = models.load(chosen.model, dtype)
    engine_options = EngineOptions(
        identity=model.identity,
        dtype=dtype,
        device_blocks=chosen.device_blocks,
        context_tokens=chosen.context,
        chunk_tokens=chosen.chunk,
        batch=chosen.batch,
        offload=not chosen.no_offload,
        pool_bytes=chosen.pool_bytes,
        codec=chosen.codec,
        disk=chosen.disk,
        disk_bytes=chosen.disk_bytes,
        share_generated=chosen.share_generated,
    )
    with Engine(model.size, model.weights, engine_options) as engine:
        engine.warm_up()
        print(f"{chosen.model} on http://{chosen.host}:{chosen.port}", flush=True)
        app = ChatServer(engine, Tokenizer(file.metadata), chosen.model).app
        limits = {"limit_concurrency": 1024, "timeout_graceful_shutdown": 5}
        uvicorn.run(app, host=chosen.host, port=chosen.port, log_level="warning", **limits)
    return 0


if __name__ == "__main__":
    sys.exit(main())
