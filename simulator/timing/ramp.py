"""Steps in a row that grow by the same from one to the next, as those of decodes do: sums in closed form."""

from math import ceil, sqrt
from typing import NamedTuple


class StepRamp(NamedTuple):
    """Step `i` takes `max(floor_s, first_s + i * slope_s)` seconds; none of the three is below 0."""

    first_s: float
    slope_s: float
    floor_s: float = 0.0  # what each takes at least, such as the host's part where it runs beside the device

    def sum_s(self, num_steps: int) -> float:
        """Seconds of the first `num_steps` steps."""
        flat = self._num_flat(num_steps)
        above = num_steps - flat
        pairs = (num_steps * (num_steps - 1) - flat * (flat - 1)) // 2  # the sum of i over [flat, num_steps)
        return flat * self.floor_s + above * self.first_s + pairs * self.slope_s

    def steps_within(self, seconds: float) -> int:
        """The most steps whose `sum_s` is at most `seconds`, which is finite."""
        if seconds < max(self.first_s, self.floor_s):
            return 0
        num = self._guess(seconds)
        while num and self.sum_s(num) > seconds:
            num -= 1
        while self.sum_s(num + 1) <= seconds:
            num += 1
        return num

    def _num_flat(self, num_steps: int) -> int:
        """How many of the first steps take no longer than the floor."""
        if self.first_s >= self.floor_s:
            return 0
        if self.slope_s <= 0:
            return num_steps
        return min(num_steps, ceil((self.floor_s - self.first_s) / self.slope_s))

    def _guess(self, seconds: float) -> int:
        """`steps_within` but for rounding: the root of a quadratic, counted from the last flat step."""
        flat = self._num_flat(int(seconds / self.floor_s) + 1) if self.floor_s > 0 else 0
        left_s = seconds - flat * self.floor_s
        if left_s <= 0:
            return int(seconds / self.floor_s)
        linear_s = self.first_s + flat * self.slope_s - self.slope_s / 2
        if self.slope_s <= 0:
            return flat + int(left_s / linear_s)
        # 2 c / (b + sqrt(b^2 + 4 a c)): the other form of the root loses all digits where the slope is small
        root = sqrt(linear_s * linear_s + 2.0 * self.slope_s * left_s)
        return flat + int(2.0 * left_s / (linear_s + root))
