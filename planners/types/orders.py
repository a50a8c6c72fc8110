"""What the controller orders one instance to do with its requests. An order is a frozen value with an id.

Orders go to instances many at once. They are fenced by the life that they are for and by their id, not by the layout's
epoch: an order that comes twice, or for another life, changes nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pengserve.planners.types.ids import InstanceKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Migrate:
    """Requests of `source` go on at `target`, with their KV, while both serve."""

    order_id: str
    source: InstanceKey
    target: InstanceKey
    request_ids: tuple[str, ...] = ()  # these; where there are none, running requests, the shortest first,
    max_tokens: int = 0  # ... whose KV has so many tokens in all, at most
    # The source is being emptied: requests that wait there without KV are sent again elsewhere, at once.
    empties: bool = False
    # What cannot move with its KV, for its kind or for want of room, is sent again from its tokens.
    must_leave: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Park:
    """Running requests of `instance` leave its batch with their KV, until `Resume`. Needs a host tier there.

    Requests that do not run there are left alone.
    """

    order_id: str
    instance: InstanceKey
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Requests that `Park` took out of the batch of `instance` go on, without computing anything again."""

    order_id: str
    instance: InstanceKey
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Full blocks of a request of `instance` are on the host alone in these layers, and on the device in all others.

    A step that reads them has them copied ahead of the computation (OrbitFlow section 3.2: every d-th layer).
    """

    order_id: str
    instance: InstanceKey
    request_id: str
    layers: tuple[int, ...]  # none: all on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class Redirect:
    """Requests that wait at `source` without KV are sent again, to `target`: the next ones first."""

    order_id: str
    source: InstanceKey
    target: InstanceKey
    max_tokens: int  # of their prompts, and of what they have generated, in all


RequestOrder = Migrate | Redirect | Park | Resume | Place
KINDS: Mapping[str, type[RequestOrder]] = {kind.__name__: kind for kind in (Migrate, Redirect, Park, Resume, Place)}
