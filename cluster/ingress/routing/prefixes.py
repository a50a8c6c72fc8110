"""What an ingress takes to be in the instances' prefix caches, from the prompts and answers that went over its links.

A prompt becomes a chain of hashes, one for each full granule of its tokens, salted with the request's `cache_salt` as
vLLM salts its own: a request with another salt finds nothing of it, here or there. Hashes are keyed with a secret of
the cluster, so that no client can aim at another's entries, and all ingresses make the same ones.

One of several ingresses does not know what the others sent. So where it knows nothing better, a prompt goes to the home
that all ingresses take for it (`planners.prefix_index.homes`), unless the queue there is longer.

Sizes are bounded: `planners.prefix_index` keeps so many granules of all instances, and here are so many sessions.
"""

from array import array
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b, sha256

from pengserve.cluster.ingress.request.record import RequestRecord
from pengserve.planners.dispatch import expected_hits
from pengserve.planners.prefix_index import PrefixIndex, home_of, homes
from pengserve.planners.types.ids import InstanceKey

GRANULE = 64  # tokens: a few of vLLM's blocks, so that hashing a prompt of 8,000 tokens takes 0.25 ms
MAX_GRANULES = 1024  # of one prompt: what lies behind is not looked at
MAX_SESSIONS = 16_384


class Prefixes:
    """Prefixes and sessions by instance, as far as this ingress knows."""

    def __init__(self, max_entries: int, secret: str = "", *, is_only_ingress: bool = True) -> None:
        """
        Args:
            max_entries: granules that are remembered; 0: neither prefixes nor sessions are.
            secret: the cluster's own.
            is_only_ingress: whether no other ingress sends requests to these instances.
        """
        self._max_entries, self._is_only_ingress = max_entries, is_only_ingress
        self._secret = sha256(secret.encode()).digest()
        self._index = PrefixIndex(max_entries)
        self._shapes: dict[InstanceKey, str] = {}
        self._sessions: OrderedDict[int, InstanceKey] = OrderedDict()

    def hits(self, record: RequestRecord) -> dict[InstanceKey, int]:
        """Tokens of the request's prompt that are probably in each instance's cache."""
        return {key: GRANULE * count for key, count in self._index.hits(self._chain(record)).items()}

    def hit_tokens(self, record: RequestRecord, key: InstanceKey) -> int:
        """The same of one instance; 0 where it probably holds none."""
        return GRANULE * self._index.hits_at(key, self._chain(record))

    def expected(self, record: RequestRecord, keys: Collection[InstanceKey]) -> Mapping[InstanceKey, int]:
        """The same, with what else each of `keys` may hold: by the request's session, or as a home."""
        if not self._max_entries:
            return {}
        session = self._session_of(record)
        session_at = None if session is None else self._sessions.get(session)
        home_tokens: Mapping[InstanceKey, int] = {}
        if not self._is_only_ingress:
            if session is not None and session_at is None:
                session_at = home_of(session, keys)
            home_tokens = {key: GRANULE * count for key, count in homes(self._chain(record), keys).items()}
        return expected_hits(self.hits(record), session_at, record.num_tokens, home_tokens)

    def sent(self, record: RequestRecord, key: InstanceKey, capacity_tokens: int) -> None:
        """A request went to `key`, whose memory holds so many tokens."""
        if not self._max_entries:
            return
        self._index.note(key, self._chain(record), capacity_tokens // GRANULE)
        session = self._session_of(record)
        if session is not None:
            self._sessions[session] = key
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def ended(self, record: RequestRecord, key: InstanceKey, capacity_tokens: int) -> None:
        """A request ended on `key`: its answer is in the cache too, for the next turn of a conversation."""
        if self._max_entries and record.chain and record.output_token_ids:
            prompt = record.request.prompt_token_ids or ()
            chain = chain_of([*prompt, *record.output_token_ids], record.request.cache_salt, self._secret)
            self._index.note(key, chain, capacity_tokens // GRANULE)

    def follow(self, key: InstanceKey, shape: str) -> None:
        """`key` works in this shape now: another lane, with a cache of its own."""
        if self._shapes.setdefault(key, shape) != shape:
            self._index.forget(key)
            self._shapes[key] = shape

    def forget(self, key: InstanceKey) -> None:
        """That incarnation is gone."""
        self._index.forget(key)
        self._shapes.pop(key, None)

    def _chain(self, record: RequestRecord) -> tuple[int, ...]:
        if record.chain is None:
            request = record.request
            # Of a prompt with images the tokens alone do not say what it is.
            is_text = self._max_entries and request.prompt_token_ids and not request.mm_features
            record.chain = chain_of(request.prompt_token_ids, request.cache_salt, self._secret) if is_text else ()
        return record.chain

    def _session_of(self, record: RequestRecord) -> int | None:
        """The request's session, which is the tenant's own: another key's session of the same name is another one."""
        session = record.options.contract.session
        return _hash(f"{record.options.key_id}/{session}".encode(), self._secret) if session else None


def chain_of(token_ids: Sequence[int], salt: str | None, secret: bytes) -> tuple[int, ...]:
    """Hashes of the full granules of `token_ids`, each of all tokens up to its end."""
    count = min(len(token_ids) // GRANULE, MAX_GRANULES)
    data = array("q", token_ids[: count * GRANULE]).tobytes()
    size, entry, chain = len(data) // count if count else 1, _hash((salt or "").encode(), secret), []
    for start in range(0, len(data), size):
        entry = _hash(entry.to_bytes(8) + data[start : start + size], secret)
        chain.append(entry)
    return tuple(chain)


def _hash(data: bytes, secret: bytes) -> int:
    return int.from_bytes(blake2b(data, key=secret, digest_size=8).digest())
