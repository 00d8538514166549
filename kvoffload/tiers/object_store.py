"""ObjectStoreTier: records in S3, Google Cloud Storage, Azure Blob Storage or a folder, through obstore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.cache.tiering.tier import Outcome
from kvoffload.internal.checks import masked, reason, seconds, shown
from kvoffload.tiers.options import Limits, import_package
from kvoffload.tiers.remote import Parts, RemoteTier

_UNFINISHED = range(1, 9)  # of as many processes that put one key at the same time
_LISTED = 1000  # names that one request lists
_NETWORK = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https")  # schemes with a client


class ObjectStoreTier(RemoteTier):
    """Records in an object store or a folder. Each is one object, header first; a put never overwrites one.

    The tier evicts nothing: let a lifecycle rule of the store delete old objects below `prefix`. `attach` makes no
    request. If the store cannot be reached, or refuses the credentials, keys are FAILED, and the logger "kvoffload"
    warns. If it is full, puts are DECLINED. A process that is killed in a put to a folder may leave a file NAME#N with
    a part of the record. `remove` of its key and `clear` delete such files; a put of another process that is writing
    one just then may fail.

    Args:
        store: the URL of an existing bucket or folder in one: "s3://bucket/folder", "gs://bucket", "az://container",
            "file:///folder". Or a store that you made with `obstore.store`, with your timeouts and retries.
        identity: a text for what the bytes depend on besides tokens and layout, such as model, revision and shard.
        prefix, key, name, limits: see `RemoteTier`; 8 threads by default.
        config: only with a URL: obstore's options for this kind of store, such as `endpoint`, `region`,
            `access_key_id`. Others come from environment variables and the machine's role.
        client_options: obstore's options for connections, such as `root_certificate`, `proxy_url`, `allow_http`.
            Ignored unless `store` is the URL of a network store.
        timeout: seconds for a request, which is not retried; a record is one request. Ignored unless `store` is the URL
            of a network store.

    Raises:
        CapabilityError: obstore is missing (`pip install 'kvoffload[objectstore]'`).
        TypeError, ValueError, obstore.exceptions.BaseError: a bad argument, or the folder does not exist.
    """

    threads = 8
    asks_for_all_keys = False  # a request for each

    def __init__(
        self,
        store: Any,
        *,
        identity: str,
        prefix: str = "kvoffload",
        key: bytes | None = None,
        config: Mapping[str, Any] | None = None,
        client_options: Mapping[str, Any] | None = None,
        timeout: float = 10.0,
        name: str = "objects",
        limits: Limits | None = None,
    ) -> None:
        super().__init__(identity=identity, prefix=prefix, key=key, name=name, durable=True, limits=limits)
        self._obstore = import_package(
            "obstore", needs="ObjectStoreTier needs the package obstore", extra="objectstore"
        )
        limit = timedelta(seconds=seconds("timeout", timeout))
        options = {"timeout": limit, "connect_timeout": limit}
        self._store = self._open(store, dict(config or {}), options | dict(client_options or {}))

    # for RemoteTier -----------------------------------------------------------------------------------------------

    def connect(self) -> None:
        pass

    def disconnect(self) -> None:
        pass

    def fetch_parts(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        return [self._fetch(name, record) for name, record in zip(names, parts, strict=True)]

    def store_parts(self, names: Sequence[str], parts: Sequence[Parts]) -> list[Outcome]:
        exists = self._obstore.exceptions.AlreadyExistsError
        for name, record in zip(names, parts, strict=True):
            try:
                self._obstore.put(self._store, name, record, mode="create", use_multipart=False)
            except exists:  # another machine was faster
                pass
        return [Outcome.DONE] * len(names)

    def have_names(self, names: Sequence[str]) -> list[bool]:
        found: list[bool] = []
        for name in names:
            try:
                self._obstore.head(self._store, name)
            except FileNotFoundError:
                found.append(False)
            else:
                found.append(True)
        return found

    def delete_names(self, names: Sequence[str]) -> list[bool]:
        found = self.have_names(names)
        self._delete([name for name, there in zip(names, found, strict=True) if there])
        self._delete_unfinished(self.format.folder, names)
        return found

    def delete_folder(self, folder: str) -> None:
        for listed in self._obstore.list(self._store, folder.rstrip("/"), chunk_size=_LISTED):
            self._delete([each["path"] for each in listed])
        self._delete_unfinished(folder)

    # inner workings -----------------------------------------------------------------------------------------------

    def _open(self, store: Any, config: dict[str, Any], client_options: dict[str, Any]) -> Any:
        if not isinstance(store, str):
            if not callable(getattr(store, "put", None)):
                raise TypeError(f"store must be a URL, or a store made by obstore.store, got {shown(store)}")
            if config:
                raise TypeError("config is for a URL: give it to the store that you have made")
            return store
        scheme, colon, _ = store.partition("://")
        if not colon:
            raise ValueError(f'store must be a URL such as "s3://bucket/folder", got {shown(store)}')
        given = config
        if scheme in _NETWORK:
            given = {"config": config, "client_options": client_options, "retry_config": {"max_retries": 0}}
        try:
            return self._obstore.store.from_url(store, **given)
        except Exception as error:
            if masked(store) == store:
                raise
            raise ValueError(reason(error)) from None  # the other lines show the URL's password by itself

    def _fetch(self, name: str, parts: Parts) -> Outcome:
        try:
            found = self._obstore.get(self._store, name)
        except FileNotFoundError:
            return Outcome.MISSING
        if found.meta["size"] != sum(part.nbytes for part in parts):  # before the bytes are fetched
            return self.reject(name)
        content = np.frombuffer(found.bytes(), np.uint8)
        ends = np.cumsum([part.nbytes for part in parts])
        for part, fetched in zip(parts, np.split(content, ends[:-1]), strict=True):
            part[:] = fetched
        return Outcome.DONE

    def _delete_unfinished(self, folder: str, names: Sequence[str] | None = None) -> None:
        """Delete the unfinished files of these names, or all, if the store is a folder of this machine.

        A process that was killed in a put leaves a file NAME#N with a part of the record, which obstore neither lists
        nor deletes; N counts from 1.
        """
        if not isinstance(self._store, self._obstore.store.LocalStore):
            return
        root = Path(self._store.prefix or "/")
        some = (root / f"{name}#{number}" for name in names or () for number in _UNFINISHED)
        for path in (root / folder).glob("*#*") if names is None else some:
            path.unlink(missing_ok=True)

    def _delete(self, names: list[str]) -> None:
        if not names:
            return
        try:
            self._obstore.delete(self._store, names)
        except FileNotFoundError:  # some stores say so of an object that another machine has deleted meanwhile
            if len(names) > 1:
                for name in names:
                    self._delete([name])
