"""Which weights of the model the keys of a cache belong to: inside, the name of the weights is part of every key.

A key of named weights has their *tag* in front: 16 bytes, a digest of the name. So a key of other weights is another
key wherever keys are compared: in slots, in tiers and stores, in a shared pool. Keys of weights without a name have no
tag.

A tenant's keys of named weights are a *namespace*: a text that stands wherever the tenant's name would, "name of the
tenant", NUL, "name of the weights". Namespaces have pools of their own (see `Pools`), so that the keys of weights that
nobody uses give way first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from hashlib import blake2b
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

from kvoffload.cache.statistics import CacheEvent
from kvoffload.internal.checks import shown

TAG_BYTES = 16
_NUL = "\0"
MARK = b"\xffkvw"  # begins the digest of a namespace of named weights, and hardly one of a tenant
LONGEST_NAME = 512  # characters: with identity and tenant it fits into one message to the owner of a shared pool
_MOST_NAMES = 4096  # that events still tell from a key


def check_weights(name: str) -> str:
    """Return a name of weights. Raises TypeError, ValueError: it is none."""
    if not isinstance(name, str):
        raise TypeError(f'name must be a string such as "policy@step-1200", got {shown(name)}')
    if _NUL in name or len(name) > LONGEST_NAME:
        raise ValueError(f"name must have at most {LONGEST_NAME} characters, and no NUL character, got {shown(name)}")
    return name


@lru_cache(64)
def tag_of(name: str) -> bytes:
    """Return the bytes in front of the keys of these weights."""
    if not name:
        return b""
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=TAG_BYTES, person=b"kvoffload weight").digest()


def namespace_of(tenant: str, name: str) -> str:
    """Return the namespace of a tenant in the keys of the weights of this name."""
    return f"{tenant}{_NUL}{name}" if name else tenant


def split_namespace(namespace: str) -> tuple[str, str]:
    """Return the tenant of a namespace, and the name of the weights."""
    tenant, _, name = namespace.partition(_NUL)
    return tenant, name


def namespace_digest(namespace: str) -> bytes:
    """Return 8 bytes for a namespace of named weights, for headers that outlive the process; b"" for other names."""
    digest = blake2b(namespace.encode("utf-8", "surrogatepass"), digest_size=4).digest()
    return MARK + digest if _NUL in namespace else b""


def lost_namespace(digest: bytes) -> str:
    """Return a text for the namespace with this digest, whose name is not known; "" if it is a tenant's digest."""
    return 2 * _NUL + digest[:8].hex() if digest.startswith(MARK) else ""


class Weights(NamedTuple):
    """The weights that a call means: read once in a call, so that its keys and its namespace are of the same weights.

    Attributes:
        name: theirs; "": they have none.
        tag: in front of their keys.
        namespaces: of each tenant in their keys; perhaps empty without a name: they are the tenants' names.
    """

    name: str = ""
    tag: bytes = b""
    namespaces: Mapping[str, str] = MappingProxyType({})

    def namespace(self, tenant: str, request: object = None) -> str:
        """Return the namespace of a tenant, whose name may be wrong. Keys of an open request are of the request's."""
        return self.namespaces.get(tenant, tenant) if request is None and isinstance(tenant, str) else tenant


class UsedWeights:
    """The weights that a cache uses now, and the names of earlier ones.

    Attributes:
        now: the weights of the calls that begin now.
        names: of weights used lately, by their tags.
        told: the name that hooks, tiers and the owner of a pool know of; None: a change was interrupted or refused.
        kept: the names whose keys do not go first, of an index with keys of several; None: that of `now`.
    """

    def __init__(self) -> None:
        self.now = Weights()
        self.names: dict[bytes, str] = {}
        self.told: str | None = ""
        self.kept: frozenset[str] | None = None

    @property
    def in_use(self) -> frozenset[str]:
        return frozenset({self.now.name}) if self.kept is None else self.kept

    def use(self, name: str, tenants: Iterable[str]) -> None:
        if name:
            self.names[tag_of(name)] = name
            if len(self.names) > _MOST_NAMES:
                del self.names[next(iter(self.names))]
        self.now = Weights(name, tag_of(name), {tenant: namespace_of(tenant, name) for tenant in tenants})

    def plain(self, keys: Sequence[bytes]) -> tuple[bytes, ...]:
        """Return the keys as the user knows them. Where there are no `names`, hot paths need not ask."""
        names = self.names
        return tuple([key[TAG_BYTES:] if key[:TAG_BYTES] in names else key for key in keys] if names else keys)

    def own(self, keys: Sequence[bytes], name: str) -> tuple[bytes, ...]:
        """Return those of the keys that are of the weights of this name, as the user knows them."""
        names = self.names
        return self.plain([key for key in keys if names.get(key[:TAG_BYTES], "") == name] if names else keys)

    def telling(self, hook: Callable[[CacheEvent], None]) -> Callable[[CacheEvent], None]:
        """Return a hook that tells the user's hook of an event: its keys without tags, those of each weights apart."""

        def tell(event: CacheEvent) -> None:
            if not (self.names and event.keys):
                hook(event)
                return
            tenant = split_namespace(event.tenant)[0]
            groups = groupby(event.keys, lambda key: self.names.get(key[:TAG_BYTES], ""))
            events = [CacheEvent(event.kind, self.plain(list(keys)), tenant, name) for name, keys in groups]
            with ExitStack() as stack:  # if the hook raises, it still hears of the others
                for each in reversed(events):
                    stack.callback(hook, each)

        return tell
