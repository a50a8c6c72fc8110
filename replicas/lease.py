"""When an orphaned instance may go: it heard from no controller for its lease, and its application is gone."""

from collections.abc import Callable


class Lease:
    """Every call of a controller renews it. An expired lease alone ends nothing: the application is asked for."""

    def __init__(self, lease_s: float, *, now: Callable[[], float], application_exists: Callable[[], bool]) -> None:
        """
        Args:
            lease_s: silence after which the application is asked for.
            now: a monotonic clock, in seconds.
            application_exists: asks the cluster; True as well where the answer cannot be had.
        """
        self.lease_s = lease_s
        self._now, self._application_exists = now, application_exists
        self._renewed_s = now()

    def renew(self) -> None:
        """A controller spoke."""
        self._renewed_s = self._now()

    def ended(self) -> bool:
        """Whether the instance should drain and exit. Starts a new term where the application still exists."""
        if self._now() - self._renewed_s < self.lease_s:
            return False
        if self._application_exists():
            self.renew()  # a new controller may take a while; ask again a lease later
            return False
        return True
