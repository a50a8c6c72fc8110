"""What groups held and queued at the last looks, and the slope of it: a median that a single arrival does not move."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from pengserve.planners.columns import Bools, Floats, GroupTable, Ints
from pengserve.planners.types.ids import InstanceId
from pengserve.planners.types.layout import Group

WINDOW_S = 2.5  # looks that a slope is taken from
MIN_GAP_S = 0.25  # between two looks that count
MIN_LOOKS = 3  # fewer tell no slope: a single step is an arrival, not a trend


@dataclass(frozen=True, slots=True)
class DemandTrend:
    """What one group held and queued at the last looks, oldest first: (seconds, blocks)."""

    group: Group
    looks: tuple[tuple[float, int], ...]


class DemandTrends(Mapping[InstanceId, DemandTrend]):
    """The trends of a layout's groups by leader, in columns `[look, group]`. An immutable value.

    The newest look of each group is in the last row; rows above its oldest one are empty there (NaN).
    """

    def __init__(
        self, table: GroupTable | None = None, times_s: Floats | None = None, blocks: Floats | None = None
    ) -> None:
        self._table = table or GroupTable.of(())
        empty = np.empty((0, len(self._table.groups)))
        self._times_s = empty if times_s is None else times_s
        self._blocks = empty if blocks is None else blocks

    def __getitem__(self, leader: InstanceId) -> DemandTrend:
        at = self._table.position_of[leader]
        group = self._table.groups[at]
        looks = zip(self._times_s[:, at].tolist(), self._blocks[:, at].tolist(), strict=True)
        found = tuple((time_s, int(blocks)) for time_s, blocks in looks if time_s == time_s)
        if group.members[0] != leader or not found:
            raise KeyError(leader)
        return DemandTrend(group, found)

    def __iter__(self) -> Iterator[InstanceId]:
        has_looks: Bools = np.asarray(~np.isnan(self._times_s).all(axis=0))
        return (leader for leader, has in zip(self._table.leaders, has_looks.tolist(), strict=True) if has)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def longer(self, table: GroupTable, blocks: Ints, is_known: Bools, now_s: float) -> "DemandTrends":
        """The trends of `table`'s groups with this look where it `is_known`, without looks that are too old.

        A group that was in no layout before begins anew. A look right after another one does not count.
        """
        times_s, before = self._of(table)
        is_recent = now_s - times_s[-1] < MIN_GAP_S if len(times_s) else np.zeros(len(is_known), dtype=np.bool_)
        counts = is_known & ~is_recent
        if not counts.any():
            return DemandTrends(table, times_s, before)
        # Where the look counts, those before move up by a row, as far as they are not too old.
        young_s = np.where(now_s - times_s <= WINDOW_S, times_s, np.nan)
        nothing = np.full((1, len(counts)), np.nan)
        times_s = np.where(counts, np.vstack([young_s, np.full_like(nothing, now_s)]), np.vstack([nothing, times_s]))
        before = np.where(counts, np.vstack([before, blocks[None, :]]), np.vstack([nothing, before]))
        is_used = ~np.isnan(times_s).all(axis=1)
        return DemandTrends(table, times_s[is_used], before[is_used])

    def blocks_per_s(self) -> Floats:
        """The median of the slopes between any two looks (Theil-Sen), for each group.

        0 where it fell, or while there are too few looks. One arrival is one step: it changes fewer than half of the
        slopes, and none that counts.
        """
        times_s, blocks = self._times_s, self._blocks
        slopes_by_group = np.zeros(len(self._table.groups))
        if len(times_s) < MIN_LOOKS:
            return slopes_by_group
        num_looks = (~np.isnan(times_s)).sum(axis=0)
        oldest = np.take_along_axis(blocks, np.minimum(len(times_s) - num_looks, len(times_s) - 1)[None, :], axis=0)[0]
        rising = np.flatnonzero((num_looks >= MIN_LOOKS) & (blocks[-1] > oldest))
        if len(rising):
            times_s, blocks, num_looks = times_s[:, rising], blocks[:, rising], num_looks[rising]
            first, second = (list(rows) for rows in zip(*combinations(range(len(times_s)), 2), strict=True))
            slopes = (blocks[second] - blocks[first]) / (times_s[second] - times_s[first])
            slopes.sort(axis=0)  # NaN last
            middle = (num_looks * (num_looks - 1) // 2 - 1) // 2
            slopes_by_group[rising] = np.maximum(0.0, np.take_along_axis(slopes, middle[None, :], axis=0)[0])
        return slopes_by_group

    def _of(self, table: GroupTable) -> tuple[Floats, Floats]:
        """The columns for `table`'s groups; empty where a group is another one than before."""
        if table is self._table:
            return self._times_s, self._blocks
        if not self._table.groups:
            return np.empty((0, len(table.groups))), np.empty((0, len(table.groups)))
        before, groups = self._table.position_of, self._table.groups
        found = [before.get(leader, -1) for leader in table.leaders]
        same = [
            at >= 0 and (groups[at] is new or groups[at] == new) for at, new in zip(found, table.groups, strict=True)
        ]
        is_same = np.array(same, dtype=np.bool_)
        times_s, blocks = self._times_s[:, found], self._blocks[:, found]
        return np.where(is_same, times_s, np.nan), np.where(is_same, blocks, np.nan)
