"""Requests that are known to kill instances, and the keys that sent them. Both are refused for an hour."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from http import HTTPStatus
from time import monotonic

import msgspec

from pengserve.cluster.ingress.vllm_openai_seam import EngineCoreRequest, GracefulHTTPError, VLLMClientError

QUARANTINE_S = 3600.0
MAX_REQUESTS = 1024  # that are remembered, the newest of them
MAX_KEYS = 1024  # the same
MAX_KILLERS_PER_KEY = 8  # requests of one API key that killed instances within `QUARANTINE_S`


class PoisonousRequestError(VLLMClientError):
    """Instances died of this request. 400, and not worth another try."""

    is_retryable = False

    def __init__(self) -> None:
        super().__init__(
            "Instances ended each time they computed this request, so it is not tried again: change its prompt or its"
            " parameters, and report the request id to the operator."
        )


class KeyClosedError(GracefulHTTPError):
    """Too many requests of this API key killed instances. 403."""

    is_retryable = False

    def __init__(self) -> None:
        super().__init__(
            f"This API key is closed for up to {QUARANTINE_S / 3600:g} h: {MAX_KILLERS_PER_KEY} of its requests ended"
            " instances.",
            HTTPStatus.FORBIDDEN,
        )


class Quarantine:
    """What one ingress remembers of requests that it gave up as killers."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._requests: OrderedDict[bytes, float] = OrderedDict()  # digest -> when it may be tried again
        self._keys: OrderedDict[str, list[float]] = OrderedDict()  # key id -> when its killers are forgotten

    def add(self, request: EngineCoreRequest, key_id: str) -> None:
        """`request` kills instances; it came with the API key that `key_id` names, "" for none."""
        until_s = self._clock() + QUARANTINE_S
        self._requests[_digest(request)] = until_s
        while len(self._requests) > MAX_REQUESTS:
            self._requests.popitem(last=False)
        if key_id:
            self._keys.setdefault(key_id, []).append(until_s)
            self._keys.move_to_end(key_id)
            del self._keys[key_id][:-MAX_KILLERS_PER_KEY]
            while len(self._keys) > MAX_KEYS:
                self._keys.popitem(last=False)

    def check(self, request: EngineCoreRequest, key_id: str) -> None:
        """Lets `request` pass, at no cost while nothing is in quarantine.

        Raises:
            PoisonousRequestError: the same request killed instances within the last hour.
            KeyClosedError: so did too many requests of the same key.
        """
        now_s = self._clock()
        if self._keys and sum(until_s > now_s for until_s in self._keys.get(key_id, ())) >= MAX_KILLERS_PER_KEY:
            raise KeyClosedError
        if self._requests and self._requests.get(_digest(request), 0.0) > now_s:
            raise PoisonousRequestError


def _digest(request: EngineCoreRequest) -> bytes:
    """A digest of all that decides what an instance computes for `request`."""
    params = request.sampling_params
    if params is not None:  # each of `n` sequences has a seed of its own, and `n` of 1
        params = params.clone()
        params.n, params.seed = 1, None
    images = [feature.identifier for feature in request.mm_features or ()]
    what = (request.prompt_token_ids, _embeddings(request), images, request.lora_request, params)
    return hashlib.sha256(msgspec.msgpack.encode(what, enc_hook=repr)).digest()


def _embeddings(request: EngineCoreRequest) -> bytes | None:
    embeddings = request.prompt_embeds
    return None if embeddings is None else embeddings.float().cpu().numpy().tobytes()
