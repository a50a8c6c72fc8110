"""Which route probably holds the KV of which prefix, by what was sent there. Bounded, and wrong without harm.

A prompt is a chain of hashes, one for each full granule of tokens: the hash of a granule stands for all content up to
its end. An entry says that a route has been sent that content. What the route has evicted since, and what others sent
it, is not known here: a wrong entry sends a request where its prefix has to be computed, as it would be elsewhere.

Each route has its entries in the order of their last use, the granules of one prompt from its end to its start. So
where an entry is there, all before it in its prompt are there too, and what goes first is the end of what was used
longest ago: the order in which vLLM's own cache evicts blocks.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence

from pengserve.planners.types.ids import InstanceKey

MAX_ENTRIES = 1 << 18  # of one index: about 50 MB
HOME_DEPTHS = (1, 4, 16, 64)  # granules of the parts of prompts that have a home


class PrefixIndex:
    """Prefixes by route. A look-up costs a search for each route; a note, an update for each granule."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        """`max_entries`: granules of all routes together, of which each has an equal share. 0: nothing is kept."""
        self._max_entries = max_entries
        self._held: dict[InstanceKey, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def note(self, key: InstanceKey, chain: Sequence[int], most: int) -> None:
        """A prompt with these hashes went to `key`, whose memory holds `most` granules."""
        if not chain or not self._max_entries:
            return
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = OrderedDict()
            self._trim_all()
        for entry in reversed(chain):
            held[entry] = None
            held.move_to_end(entry)
        _trim(held, min(most, self._share))

    def hits(self, chain: Sequence[int]) -> dict[InstanceKey, int]:
        """How many granules from the start of a prompt each route probably holds; routes without any are left out."""
        if not chain:
            return {}
        first = chain[0]
        return {key: _num_held(held, chain) for key, held in self._held.items() if first in held}

    def hits_at(self, key: InstanceKey, chain: Sequence[int]) -> int:
        """The same of one route; 0 where it holds none."""
        held = self._held.get(key)
        return _num_held(held, chain) if held and chain and chain[0] in held else 0

    def forget(self, key: InstanceKey) -> None:
        """That route holds nothing any more: it is gone, or works in another shape."""
        self._held.pop(key, None)

    @property
    def _share(self) -> int:
        return self._max_entries // len(self._held)

    def _trim_all(self) -> None:
        for held in self._held.values():
            _trim(held, self._share)


def home_of(entry: int, keys: Collection[InstanceKey]) -> InstanceKey | None:
    """The route of `keys` that all ingresses take for the home of `entry`, without a word to each other.

    Rendezvous hashing: where a route comes or goes, no other entry changes its home. A replacement takes over that of
    the life before.
    """
    return max(keys, key=lambda key: (hash((entry, key.instance_id)), key), default=None)


def homes(chain: Sequence[int], keys: Collection[InstanceKey]) -> dict[InstanceKey, int]:
    """Granules of a prompt that each route may hold as the home of a part of it, sent there by other ingresses.

    A home counts as holding that part. Prompts that share much have the same deep home and gather there; what only
    begins with the same words has a shallow one, which is worth no queue.
    """
    found: dict[InstanceKey, int] = {}
    for depth in HOME_DEPTHS:
        home = home_of(chain[depth - 1], keys) if len(chain) >= depth else None
        if home is not None:
            found[home] = depth
    return found


def _num_held(held: OrderedDict[int, None], chain: Sequence[int]) -> int:
    """Length of the longest prefix that is held, of which the first granule is."""
    low, high = 1, len(chain)  # held[: low] are, and none after `high` is
    while low < high:
        middle = (low + high + 1) // 2
        if chain[middle - 1] in held:
            low = middle
        else:
            high = middle - 1
    return low


def _trim(held: OrderedDict[int, None], most: int) -> None:
    while len(held) > most:
        held.popitem(last=False)
