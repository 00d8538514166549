"""The HTTP side, in asyncio: chat completions as OpenAI has them, conversations in files, metrics, a page to chat in.

The engine has a thread of its own, which hands over token by token. A slow client keeps nobody waiting: its tokens wait
in a queue, at most `max_tokens` of them. If a client leaves, its request is cancelled.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from chat_server.engine import Engine
from chat_server.requests import BusyError, TooLongError, Wanted
from chat_server.tokenizer import Stream, Tokenizer
from kvoffload import KVOffloadError, MissingKeyError
from kvoffload.observability import prometheus

MOST_BODY_BYTES = 4 << 20
MOST_FILE_BYTES = 1 << 30  # of a conversation
DEFAULT_MAX_TOKENS = 256
MOST_SESSION = 256
TOO_LONG = "context_length_exceeded"
ROLES = ("system", "user", "assistant")
SESSION = "prompt_cache_key"  # the name in OpenAI's API for requests that share a prefix
USED = {"messages", "model", "max_tokens", "max_completion_tokens", "temperature", "seed", "stream", "stream_options"}
NEUTRAL = {"n": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0}  # what others may be set to


LoadWeights = Callable[[str], dict[str, Any]]


class RefusedError(Exception):
    """What a client gets instead of an answer."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": "invalid_request_error", "code": code, "param": None}}


class ChatServer:
    """The endpoints over an engine: `app`, for an ASGI server. The engine starts and is closed with it.

    Args:
        name: the model's, for clients.
        load: returns the weights of a name, for `/weights`; raises ValueError: there are none. None: they never change.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, name: str, load: LoadWeights | None = None) -> None:
        self._engine, self._tokenizer, self._name, self._load = engine, tokenizer, name, load
        self._moving = asyncio.Lock()  # a conversation in a file, one at a time: it takes up to a quarter of the slots
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(EngineCollector(engine))
        self._first_token = prometheus_client.Histogram(
            "chat_time_to_first_token_seconds",
            "From a request to its first token",
            registry=self._registry,
            buckets=[2.0**power for power in range(-9, 7)],
        )
        if engine.cache is not None:
            prometheus.register(engine.cache, self._registry)
        page = Path(__file__).with_name("page.html").read_text()
        models = [{"id": name, "object": "model", "created": 0, "owned_by": "kvoffload"}]
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", lambda _: JSONResponse({"object": "list", "data": models})),
            Route("/metrics", self._metrics),
            Route("/health", self._health),
            Route("/weights", self._use_weights, methods=["POST"]),
            Route("/conversations", self._download, methods=["POST"]),
            Route("/conversations", self._upload, methods=["PUT"]),
            Route("/", lambda _: HTMLResponse(page)),
        ]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self._engine.close)

    async def _metrics(self, _: HttpRequest) -> Response:
        text = await asyncio.to_thread(prometheus_client.generate_latest, self._registry)
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def _health(self, _: HttpRequest) -> Response:
        """200 while requests are answered; 503 once the engine has ended, and why."""
        serving, error = self._engine.serving, self._engine.error
        return JSONResponse({"serving": serving, "error": error and repr(error)}, 200 if serving else 503)

    async def _use_weights(self, http: HttpRequest) -> Response:
        """Answer with the weights of another name from now on: {"name": "policy@step-1200"}; "": those of the start."""
        try:
            name = (await _body(http)).get("name")
            if self._load is None or not isinstance(name, str):
                raise RefusedError(f"name must be that of weights that this server can load, got {name!r:.80}")
            try:
                weights = await asyncio.to_thread(self._load, name)
                await asyncio.to_thread(self._engine.use_weights, name, weights)
            except ValueError as error:
                raise RefusedError(str(error), 404, "weights_not_found") from None
            except RuntimeError as error:
                raise RefusedError(str(error), 503, "overloaded") from None
            return JSONResponse({"weights": name})
        except RefusedError as refused:
            return JSONResponse(refused.body, refused.status)

    async def _download(self, http: HttpRequest) -> Response | Handed:
        """Answer with a file of the leading blocks of a conversation, which has the body of a chat completion."""
        try:
            self._needs_cache()
            asked = await _body(http)
            prompt = await asyncio.to_thread(self._prompt, asked)
            self._wanted(asked, len(prompt))  # refuses what a completion refuses
            with _refusing():
                async with self._moving:
                    return Handed(await asyncio.to_thread(self._saved, prompt))
        except RefusedError as refused:
            return JSONResponse(refused.body, refused.status)

    async def _upload(self, http: HttpRequest) -> Response:
        """Let the prompts of a conversation find the blocks of its file. It is a stranger's: the library checks it."""
        try:
            self._needs_cache()
            with _refusing(), NamedTemporaryFile(prefix="chat-") as file:
                async for piece in _pieces(http, MOST_FILE_BYTES):
                    await asyncio.to_thread(file.write, piece)
                file.flush()
                try:
                    async with self._moving:
                        restored = await asyncio.to_thread(self._engine.restore, file.name)
                except ValueError as error:
                    raise RefusedError(str(error).replace(repr(file.name), "the file")) from None
            return JSONResponse(restored._asdict())
        except RefusedError as refused:
            return JSONResponse(refused.body, refused.status)

    def _needs_cache(self) -> None:
        if self._engine.cache is None:
            raise RefusedError("this server has nothing below the device: start it with offload", 404, "no_cache")

    def _saved(self, prompt: list[int]) -> TemporaryDirectory[str]:
        """A folder, whose only file has the blocks of this prompt."""
        folder = TemporaryDirectory(prefix="chat-")
        try:
            self._engine.save(prompt, Path(folder.name, Handed.FILE))
        except BaseException:
            folder.cleanup()
            raise
        return folder

    async def _chat(self, http: HttpRequest) -> Response:
        try:
            asked = await _body(http)
            prompt = await asyncio.to_thread(self._prompt, asked)
            answer = Answer(self._engine, self._tokenizer, prompt, self._wanted(asked, len(prompt)))
            if asked.get("stream"):
                with_usage = bool((asked.get("stream_options") or {}).get("include_usage"))
                return StreamingResponse(self._events(answer, with_usage), media_type="text/event-stream")
            return JSONResponse(await self._completion(answer, http))
        except RefusedError as refused:
            return JSONResponse(refused.body, refused.status)

    def _prompt(self, asked: dict[str, Any]) -> list[int]:
        messages = asked.get("messages")
        if not isinstance(messages, list) or not messages:
            raise RefusedError("messages must be a list of at least one message")
        texts = list(map(_message, messages))
        num_bytes = sum(len(each["content"].encode(errors="replace")) for each in texts)
        if num_bytes > self._engine.longest * self._tokenizer.longest:  # without looking at its tokens
            said = f"the context has {self._engine.longest} tokens, and the messages {num_bytes} bytes"
            raise RefusedError(said, code=TOO_LONG)
        return self._tokenizer.chat(texts)

    def _wanted(self, asked: dict[str, Any], prompt_tokens: int) -> Wanted:
        if asked.get("model") not in (None, self._name):
            said = f"there is no model {asked['model']!r:.80} here: leave model out, or write {self._name!r}"
            raise RefusedError(said, 404, "model_not_found")
        for name, value in asked.items():
            if name not in {*USED, SESSION} and value is not None and value != NEUTRAL.get(name):
                raise RefusedError(f"{name}={value!r:.80} is not supported here", code="unsupported")
        session = asked.get(SESSION)
        if session is not None and not (isinstance(session, str) and len(session) <= MOST_SESSION):
            raise RefusedError(f"{SESSION} must be a string of at most {MOST_SESSION} characters, got {session!r:.80}")
        room = max(self._engine.longest - prompt_tokens, 1)  # with none, the engine refuses it
        name = "max_tokens" if asked.get("max_completion_tokens") is None else "max_completion_tokens"
        return Wanted(
            max_tokens=int(_number(asked, name, min(DEFAULT_MAX_TOKENS, room), 1, 1 << 31)),
            temperature=_number(asked, "temperature", 0, 0, 2),
            seed=int(_number(asked, "seed", 0, -(1 << 63), 1 << 63)) % (1 << 32),
            stop=self._tokenizer.stop,
            session=session,
        )

    async def _completion(self, answer: Answer, http: HttpRequest) -> dict[str, Any]:
        async def collect() -> str:
            return "".join([text async for text in answer.texts()])

        async def left() -> None:
            while (await http.receive())["type"] != "http.disconnect":
                pass

        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(collect()), asyncio.create_task(left())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise RefusedError("the client has left", 499)
            choice = {"index": 0, "message": {"role": "assistant", "content": tasks[0].result()}}
        finally:
            tasks[0].cancel()
            tasks[1].cancel()
            self._engine.cancel(answer.request)
        return self._object("chat.completion", answer, [choice | {"finish_reason": self._finished(answer)}])

    async def _events(self, answer: Answer, with_usage: bool) -> AsyncIterator[str]:
        def event(delta: dict[str, str], finish_reason: str | None = None) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
            return _event(self._object("chat.completion.chunk", answer, [choice], usage=None))

        try:
            yield event({"role": "assistant", "content": ""})
            async for text in answer.texts():
                yield event({"content": text})
            yield event({}, self._finished(answer))
            if with_usage:
                yield _event(self._object("chat.completion.chunk", answer, []))
            yield "data: [DONE]\n\n"
        except RefusedError as refused:
            yield _event(refused.body)
        finally:  # Starlette ends this if the client has left
            self._engine.cancel(answer.request)

    def _object(self, kind: str, answer: Answer, choices: list[Any], **fields: Any) -> dict[str, Any]:
        about = {"id": answer.name, "object": kind, "created": answer.created, "model": self._name}
        return about | {"choices": choices, "usage": answer.usage()} | fields

    def _finished(self, answer: Answer) -> str:
        request = answer.request
        if request.finish_reason not in ("stop", "length"):
            raise RefusedError(f"the request has ended: {request.finish_reason}", 500, "engine_error")
        if request.first_token:
            self._first_token.observe(request.first_token - request.submitted)
        return request.finish_reason


class Answer:
    """A request of the engine, and its tokens as text. Raises RefusedError if the engine does not take it."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, prompt: list[int], wanted: Wanted) -> None:
        self.name, self.created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        self._stream, self._tokens = Stream(tokenizer), asyncio.Queue[int | None]()
        deliver, put = asyncio.get_running_loop().call_soon_threadsafe, self._tokens.put_nowait
        try:
            self.request = engine.submit(prompt, wanted, lambda token: deliver(put, token))
        except TooLongError as error:
            raise RefusedError(str(error), code=TOO_LONG) from None
        except (BusyError, RuntimeError) as error:
            raise RefusedError(str(error), 503, "overloaded") from None

    async def texts(self) -> AsyncIterator[str]:
        token: int | None = 0
        while token is not None:
            token = await self._tokens.get()
            if text := self._stream.text(token):
                yield text

    def usage(self) -> dict[str, Any]:
        prompt, answered = len(self.request.prompt), len(self.request.generated)
        cached = {"cached_tokens": min(self.request.hits.total(), prompt)}
        tokens = {"prompt_tokens": prompt, "completion_tokens": answered, "total_tokens": prompt + answered}
        return tokens | {"prompt_tokens_details": cached}


class Handed:
    """A response: the file in a folder, which is removed when the file has been sent, or cannot be.

    Args:
        folder: with `FILE` in it.
    """

    FILE = "conversation.kv"

    def __init__(self, folder: TemporaryDirectory[str]) -> None:
        self._folder = folder

    async def __call__(self, *asgi: Any) -> None:
        file = Path(self._folder.name, self.FILE)
        try:
            await FileResponse(file, media_type="application/octet-stream", filename=self.FILE)(*asgi)
        finally:
            self._folder.cleanup()


class EngineCollector:
    """What the engine counts, for Prometheus."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Any]:
        engine = self._engine
        prompts = CounterMetricFamily("chat_prompt_tokens", "Tokens of prompts, by where they were", labels=["source"])
        for source in ("device", "host", "disk", "computed"):
            prompts.add_metric([source], engine.counts[source])
        yield prompts
        for name in ("generated", "preempted", "cancelled", "failed_loads"):
            yield CounterMetricFamily(f"chat_{name}", "See Engine.counts", value=engine.counts[name])
        gauges = {"running": len(engine.running), "waiting": len(engine.waiting), "free_blocks": engine.blocks.free}
        for name, value in gauges.items():
            yield GaugeMetricFamily(f"chat_{name}", "Now", value=value)


@contextmanager
def _refusing() -> Iterator[None]:
    """What a client is told if its conversation cannot be saved or restored now."""
    try:
        yield
    except MissingKeyError:
        said = "no block of this conversation is below the device: it must have been answered here, or uploaded"
        raise RefusedError(said, 404, "conversation_not_found") from None
    except (KVOffloadError, RuntimeError, OSError) as error:
        raise RefusedError(str(error), 503, "overloaded") from None


async def _pieces(http: HttpRequest, most: int) -> AsyncIterator[bytes]:
    """The body as it comes, of at most so many bytes."""
    received, refused = 0, RefusedError(f"the body has more than {most} bytes", 413)
    if int(http.headers.get("content-length", 0)) > most:  # before the client sends it
        raise refused
    try:
        async for piece in http.stream():
            received += len(piece)
            if received > most:
                raise refused
            yield piece
    except ClientDisconnect:
        raise RefusedError("the client has left", 499) from None


async def _body(http: HttpRequest) -> dict[str, Any]:
    data = b"".join([piece async for piece in _pieces(http, MOST_BODY_BYTES)])
    try:
        asked = json.loads(data)
    except ValueError as error:
        raise RefusedError(f"the body is no JSON: {error}") from None
    if not isinstance(asked, dict):
        raise RefusedError("the body must be a JSON object")
    return asked


def _message(given: Any) -> dict[str, str]:
    """Role and text of a message. Its content is a text, or a list of {"type": "text", "text": ...}."""
    message = given if isinstance(given, dict) else {}
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if message.get("role") not in ROLES or not all(isinstance(text, str) for text in texts):
        raise RefusedError(f"a message must have text as content, and one of the roles {ROLES}, got {given!r:.80}")
    return {"role": message["role"], "content": "".join(map(str, texts))}


def _number(asked: dict[str, Any], name: str, default: float, least: float, most: float) -> Any:
    value = default if asked.get(name) is None else asked[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise RefusedError(f"{name} must be a number from {least} to {most}, got {value!r:.80}")
    return value


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
