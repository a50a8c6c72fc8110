"""One request that an ingress keeps, and what the book of them calls."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple, Protocol

import msgspec

from pengserve.cluster.ingress.request.kept import KeptSequence
from pengserve.cluster.ingress.request.moves import Stash
from pengserve.cluster.ingress.request.request_options import NO_OPTIONS, RequestOptions
from pengserve.cluster.ingress.request.suspicion import PROVEN_TOKENS, Suspicion
from pengserve.cluster.ingress.vllm_openai_seam import EngineCoreOutput, EngineCoreRequest
from pengserve.planners.lengths import LengthRange
from pengserve.planners.types.ids import InstanceKey
from pengserve.replicas.engine.link import InstanceLink
from pengserve.replicas.engine.wire import copy_id

MAX_LIFE = 64  # notes of one request


class Resumption(NamedTuple):
    """How a request comes to an instance that had begun elsewhere."""

    num_tokens: int  # output tokens that it brings
    why: str  # "lost": its instance died; "drained": it was emptied


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One sequence that an instance generates, or will."""

    request: EngineCoreRequest
    options: RequestOptions = NO_OPTIONS
    output_token_ids: list[int] = field(default_factory=list)
    link: InstanceLink | None = None  # None: waits for an instance
    wire_id: str = ""  # of the newest copy
    num_copies: int = 0  # how often it was sent
    num_losses_seen: int = 0  # losses of any link before the newest copy was sent
    stash: Stash | None = None
    num_losses: int = 0
    num_losses_in_place: int = 0  # in a row without a new token
    suspicion: Suspicion | None = None  # None: no instance died of it, for all we know
    trial_ends_at: int | None = None  # output tokens with which a suspect on an instance is acquitted
    verdict_at_s: float | None = None  # when it is given up, unless something else turns out to kill instances
    sent_s: float = 0.0  # when the newest copy was sent,
    num_tokens_when_sent: int = 0  # ... and how many output tokens it brought
    num_redirects_in_place: int = 0  # the same
    created_s: float = field(default_factory=monotonic)
    waiting_since_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    is_unsettled: bool = False  # was moved, redirected or lost, and has had no token since
    resumed_why: str = ""  # its next copy replaces one that was "lost", or whose instance was "drained"
    lost_since_s: float | None = None  # until the first token after a loss
    kept: KeptSequence | None = None  # what it gets of its SLO; None: it has none
    expected: LengthRange | None = None  # of its answer, as predicted when it was first sent; None: it has no SLO
    first_after: tuple[str, int] | None = None  # shape and prompt tokens that its newest copy waits for, as predicted
    chain: tuple[int, ...] | None = None  # hashes of its prompt, for dispatch; None: not made yet
    priority: int = field(init=False)  # the client's; the request's own may be what the order of shares makes of it
    life: list[tuple[float, str, str]] = field(default_factory=list)  # seconds after it came, what, instance
    num_cached_tokens: int = 0  # of its prompt, found in a prefix cache when it was computed first
    num_parks: int = 0  # times that it left a batch with its KV, and went on,
    swapped_bytes: int = 0  # ... and what was copied of it between device and host meanwhile
    num_recomputes: int = 0  # times that it lost its KV to others on its instance
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.priority = self.request.priority
        prompt = self.request.prompt_token_ids
        self.num_prompt_tokens = len(prompt) if prompt is not None else len(self.request.prompt_embeds)

    @property
    def request_id(self) -> str:
        """The id that its client knows it by."""
        return str(self.request.external_req_id or self.request.request_id)

    def note(self, now_s: float, what: str, key: InstanceKey) -> None:
        """Something became of it: "sent", "resumed", "carried", "handed back", "lost", or "shape tp2"."""
        if len(self.life) < MAX_LIFE:
            self.life.append((now_s - self.created_s, what, str(key)))

    @property
    def num_tokens(self) -> int:
        """Tokens of KV it needs at once: the prompt and what was generated."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def is_at_limit(self) -> bool:
        """Whether it has all the output tokens it asked for."""
        params = self.request.sampling_params
        return params is not None and params.max_tokens is not None and len(self.output_token_ids) >= params.max_tokens

    def total_tokens(self, max_model_len: int) -> int:
        """Tokens it may grow to, of which a cluster of this length can promise `max_model_len`."""
        params = self.request.sampling_params
        total = self.num_tokens + 1
        if self.options.has_length and params is not None and params.max_tokens is not None:
            total = self.num_prompt_tokens + params.max_tokens
        return max(self.num_tokens, min(total, max_model_len))

    @property
    def has_tokens_here(self) -> bool:
        """Whether the newest copy has computed a token."""
        return len(self.output_token_ids) > self.num_tokens_when_sent

    @property
    def is_proven(self) -> bool:
        """Whether the newest copy has run for long enough to count as harmless."""
        return len(self.output_token_ids) - self.num_tokens_when_sent >= PROVEN_TOKENS

    @property
    def is_suspect(self) -> bool:
        """Whether it may go only where a further death tells whether it was the cause."""
        if self.suspicion is None:
            return False
        self.suspicion.decay(len(self.output_token_ids))
        return self.suspicion.needs_trial

    @property
    def num_suspected_deaths(self) -> int:
        """Deaths of instances that it may have caused."""
        return self.suspicion.num_deaths if self.suspicion is not None else 0

    @property
    def is_urgent(self) -> bool:
        """Whether it is above normal priority; as in vLLM, a lower number is more urgent."""
        return self.priority < 0

    def next_copy(self) -> EngineCoreRequest:
        """The request as the next instance must see it, under a new wire id.

        Prompt logprobs came with the first token, and are not asked for again.
        """
        self.num_copies += 1
        request, params = self.request, self.request.sampling_params
        if self.num_copies == 1:
            return request
        if self.output_token_ids and params is not None and params.prompt_logprobs is not None:
            params = params.clone()
            params.prompt_logprobs = None
            self.request = request = msgspec.structs.replace(request, sampling_params=params)
        return msgspec.structs.replace(request, request_id=copy_id(request.request_id, self.num_copies))


class RecordEvents(Protocol):
    """Who hears what becomes of records. Called in the event loop; must not wait."""

    def on_failed(self, request_id: str, error: Exception) -> None:
        """The request is given up."""

    def on_ended(self, record: RequestRecord, finish: str) -> None:
        """The book forgets `record`, after any end: "stop", "length", "abort", "error", ..."""

    def on_finished(self, output: EngineCoreOutput) -> None:
        """The request turned out to be complete when its instance died; `output` says so."""

    def on_dispatched(self, key: InstanceKey, resumed: Resumption | None) -> None:
        """A request went to an instance; `resumed` tells where from, if it had begun elsewhere."""

    def on_resumed(self, gap_s: float) -> None:
        """The first token after a loss came, `gap_s` after it."""

    def on_request_moved(self, *, carried: bool) -> None:
        """A switch moved a request: carried with its KV, or to be sent again."""

    def on_switched(self, gap_s: float) -> None:
        """The first token after a switch came, `gap_s` after the last one before it."""


class Links(Protocol):
    """The channels to instances, as the book needs them."""

    def ready(self) -> Sequence[InstanceLink]:
        """Open links that take new requests."""

    def find(self, key: InstanceKey) -> InstanceLink | None:
        """The open link to that life of an instance, whether or not it takes new requests."""

    def is_leaving(self, key: InstanceKey) -> bool:
        """Whether the routing table does not name that life any more, as one that is being drained."""

    def discard(self, link: InstanceLink) -> None:
        """A send over `link` failed."""
