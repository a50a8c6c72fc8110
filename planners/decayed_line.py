"""A line through what was seen lately: least squares, in which the newest points weigh most."""

from dataclasses import dataclass


@dataclass(slots=True)
class DecayedLine:
    """Weighted sums of points (x, y)."""

    keep: float  # factor on the weight of all points before, with each new one; below 1
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    num_seen: int = 0

    def add(self, x: float, y: float) -> None:
        """A point."""
        keep = self.keep
        self.weight = keep * self.weight + 1.0
        self.x, self.y = keep * self.x + x, keep * self.y + y
        self.xx, self.xy = keep * self.xx + x * x, keep * self.xy + x * y
        self.num_seen += 1

    @property
    def mean_x(self) -> float:
        """Of the points; there is one."""
        return self.x / self.weight

    @property
    def mean_y(self) -> float:
        """Of the points; there is one."""
        return self.y / self.weight

    @property
    def variance(self) -> float:
        """Of x."""
        return self.xx / self.weight - self.mean_x * self.mean_x

    @property
    def slope(self) -> float:
        """Of the line; x has varied."""
        return (self.xy / self.weight - self.mean_x * self.mean_y) / self.variance
