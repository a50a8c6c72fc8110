"""Which requests an instance steps where their KV is more than its device holds.

The device has cells: the KV of one block in one layer. A request that decodes is stepped where all its cells fit, or
else waits with its KV kept. A prompt is computed where only one layer of it fits beside the blocks that are being
written, since its other layers may be on the host (LayerKV section 3.1). A simple order, for a policy with SLOs to
replace:

    1. requests that decode, the oldest first, up to a share of the device
    2. prompts, the oldest first; those under way, then new ones
    3. requests that decode, the oldest first, as far as they fit

That is done for each band of urgency in turn, the most urgent first: a prompt takes no room from a more urgent request
that decodes. A prompt that fits only on an empty device makes those of its band that decode wait; a request that never
fits is stepped alone, with its layers staged.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

DECODE_SHARE = 0.5  # of the device, for requests that decode, before prompts get theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanting:
    """A request that could be stepped."""

    request_id: str
    num_blocks: int  # it holds, or will hold when its prompt is computed
    num_tokens: int  # it would compute: 1 where it decodes; of a new one, without those of cached prefixes
    is_parked: bool = False
    is_new: bool = False  # holds no KV yet
    shared: tuple[int, ...] = ()  # of its blocks, those that other requests hold too: prefixes
    away: tuple[int, ...] = ()  # layers in which `num_away` of its blocks are on the host alone,
    num_away: int = 0  # ... and which are staged in each step (`placement.solver.cells_of`)
    band: int = 0  # the least is the most urgent

    @property
    def is_prompt(self) -> bool:
        """Whether tokens of its prompt are to be computed."""
        return self.is_new or self.num_tokens > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What an instance has."""

    num_cells: int
    num_reserved: int  # blocks that are on the device in all layers and cannot leave it, once the host is full
    num_layers: int
    block_size: int  # tokens
    max_tokens: int  # of a step
    num_free: int = 1 << 62  # blocks that the scheduler can hand out now, of device and host


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """What the next step may take. All running requests that are not named here are parked."""

    stepped: frozenset[str]  # running and parked requests
    num_new: int  # of the requests that hold no KV, in their order
    max_tokens: int


def plan_residency(wanting: Sequence[Wanting], device: Device) -> Residency:
    """Who is stepped next.

    Args:
        wanting: the most urgent first, then the oldest; new ones in the order in which the scheduler takes them.
    """
    num_decoding = sum(not request.is_prompt for request in wanting)
    bands = sorted({request.band for request in wanting})
    # A prompt that needs nearly all of the device would wait for ever behind requests that decode.
    for share in (DECODE_SHARE, 0.0):
        room = _Room(device, device.max_tokens - num_decoding)
        for band in bands:
            if not room.add_band([request for request in wanting if request.band == band], share):
                break
        if room.num_prompts or num_decoding == len(wanting):
            break
    if not room.stepped and not room.num_new and wanting:
        room.add_alone(wanting[0])
    return Residency(stepped=frozenset(room.stepped), num_new=room.num_new, max_tokens=max(1, room.num_tokens))


class _Room:
    """The device while it is filled.

    Cells of blocks that are in all layers, or that cannot leave, are side by side; what is staged takes turns in the
    rest, a layer after the other.
    """

    def __init__(self, device: Device, prompt_tokens: int) -> None:
        """`prompt_tokens`: tokens of a step that prompts may have; one at least."""
        self._device = device
        self._num_whole = self._num_staged = 0  # blocks: in all layers, and in one at a time
        self._away = [0] * device.num_layers  # of those in all layers, blocks that are on the host, by layer
        self._tokens_left = max(1, prompt_tokens)
        self._num_free = device.num_free
        self._whole_blocks: set[int] = set()  # shared ones that are counted already, in all layers
        self._staged_blocks: set[int] = set()  # ... or in one at a time
        self.stepped: set[str] = set()
        self.num_new = self.num_prompts = self.num_tokens = 0
        self._takes_prompts = True  # none begins before one that was there before it

    def add_band(self, requests: Sequence[Wanting], share: float) -> bool:
        """Takes equally urgent requests; those that decode come before prompts up to `share` of the device.

        Returns whether all that decode fit: else what is left is theirs, and not less urgent requests'.
        """
        decoding = [request for request in requests if not request.is_prompt]
        self.add_decoding(decoding, share)
        self._takes_prompts = self._takes_prompts and self.add_prompts([r for r in requests if r.is_prompt])
        return self.add_decoding(decoding, 1.0)

    def add_decoding(self, requests: Sequence[Wanting], share: float) -> bool:
        """Takes them in order up to `share` of the device; the first that does not fit ends it. Whether all did.

        One that is parked comes back where a block more for each fits too: else it would leave with the next one.
        """
        for request in requests:
            if request.request_id in self.stepped:
                continue
            spare = len(self.stepped) + 1 if request.is_parked else 0
            num_own = _num_own(request, self._whole_blocks)
            if not self._fits(num_own + spare, 0, share, request):
                return False
            self._num_whole += num_own
            for layer in request.away:
                self._away[layer] += request.num_away
            self._whole_blocks.update(request.shared)
            self.num_tokens += 1
            self.stepped.add(request.request_id)
        return True

    def add_prompts(self, requests: Sequence[Wanting]) -> bool:
        """Takes prompts in order while tokens are left, up to the first that does not fit; whether it took all."""
        for request in requests:
            tokens = min(request.num_tokens, self._tokens_left)
            written = self._written(request, tokens)
            if not tokens or not self._fits(written, self._num_staged_of(request)):
                return False
            if request.is_new and request.num_blocks > self._num_free:
                return False  # the scheduler would not begin it
            self._take(request, tokens)
        return True

    def add_alone(self, request: Wanting) -> None:
        """A request that never fits is stepped with its layers staged; a prompt with fewer tokens, where it must."""
        tokens = min(request.num_tokens, self._tokens_left)
        while tokens > 1 and not self._fits(self._written(request, tokens), self._num_staged_of(request)):
            tokens //= 2
        self._take(request, tokens)

    def _take(self, request: Wanting, tokens: int) -> None:
        written = self._written(request, tokens)
        self._num_whole += written
        self._num_staged += self._num_staged_of(request)  # what is written counts twice: how much, vLLM decides
        self._staged_blocks.update(request.shared)
        self._tokens_left -= tokens
        self.num_tokens += tokens
        self.num_prompts += 1
        if request.is_new:
            self._num_free -= request.num_blocks
            self.num_new += 1
        else:
            self.stepped.add(request.request_id)

    def _num_staged_of(self, request: Wanting) -> int:
        return _num_own(request, self._whole_blocks | self._staged_blocks if request.shared else frozenset())

    def _written(self, request: Wanting, tokens: int) -> int:
        """Blocks that are on the device in all layers at least: those that are written."""
        return min(request.num_blocks, -(-tokens // self._device.block_size) + 1)

    def _fits(self, num_whole: int, num_staged: int, share: float = 1.0, more: Wanting | None = None) -> bool:
        """Whether so many blocks more fit; `more`: a request that decodes, with layers of its own on the host."""
        device = self._device
        whole, staged = self._num_whole + num_whole, self._num_staged + num_staged
        cells, ring = device.num_layers * whole, 0
        if any(self._away) or (more is not None and more.away):
            away = self._away.copy()
            if more is not None:
                for layer in more.away:
                    away[layer] += more.num_away
            cells, ring = cells - sum(away), max(away)
        if staged or ring:
            cells = max(cells, device.num_layers * device.num_reserved)
        return cells + staged + ring <= share * device.num_cells


def _num_own(request: Wanting, counted: Set[int]) -> int:
    """Blocks that a request adds to those that are counted: a shared prefix is on the device once."""
    return request.num_blocks - sum(block in counted for block in request.shared)
