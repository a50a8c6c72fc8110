"""Turns of requests that are on the devices or on the host as a whole: in pipelines, which place no layers. Pure.

As OrbitFlow pauses (section 3.4): KV times slack says who waits, where slack is what the deposit and the SLO give.

    leaves      where blocks are missing: the one with the most KV times slack, whose client does not notice
    comes back  where there is room: who was paused too long, then the most urgent, then the one with the least slack
    makes way   for one that was paused too long: any; for one whose deposit is nearly spent: those with deeper ones
"""

import math
from collections.abc import Sequence

from pengserve.planners.placement.pausing import is_overdue, kv_times_slack, slack_s
from pengserve.planners.placement.values import Decode, PlacementConfig

Rank = tuple[float | str, ...]


def leaving(request: Decode, lead_s: float) -> Rank:
    """The greatest leaves first.

    Args:
        lead_s: a client that would notice a pause within so many seconds counts as one that does.
    """
    band, arrived_s = request.rank
    is_unnoticed = not request.will_notice(lead_s)
    return request.may_pause, band, is_unnoticed, kv_times_slack(request), arrived_s, request.request_id


def coming(request: Decode, config: PlacementConfig) -> Rank:
    """The least comes back first."""
    band, arrived_s = request.rank
    if is_overdue(request, config):
        return -math.inf, -(request.paused_s or 0.0), 0.0, arrived_s, request.request_id
    return 0.0, band, slack_s(request), arrived_s, request.request_id


def is_better_victim(other: Decode, victim: Decode, lead_s: float) -> bool:
    """Whether it is worth a step to wait for `other`, which is in one, rather than that `victim` leaves."""
    if not other.may_pause:
        return False
    if other.rank[0] != victim.rank[0]:
        return other.rank[0] > victim.rank[0]
    return victim.will_notice(lead_s) and not other.will_notice(lead_s)


def making_way(waiting: Decode, stepped: Sequence[Decode], config: PlacementConfig, lead_s: float) -> list[Decode]:
    """Who may leave for a request that waits and finds no room, the first one first; empty: it waits on.

    One whose deposit is spent has missed its SLO already: another would only miss its own too.
    """
    able = [request for request in stepped if request.may_pause]
    if not is_overdue(waiting, config):
        if not (waiting.deposit_tokens and waiting.will_notice(lead_s)):
            return []
        least = config.min_window + config.lead_steps  # so that it does not want its place back at once
        able = [r for r in able if r.deposit_tokens >= least and r.rank[0] >= waiting.rank[0]]
    return sorted(able, key=lambda request: leaving(request, lead_s), reverse=True)
