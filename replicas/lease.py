"""When an orphaned instance may go: it heard from no controller for its lease, and its application is gone."""

from collections.abc import Callable

# Questions in a row without an answer, a lease apart, after which an instance that no ingress uses goes as well.
MAX_UNANSWERED = 10


class Lease:
    """Every call of a controller renews it. An expired lease alone ends nothing: the application is asked for."""

    def __init__(
        self,
        lease_s: float,
        *,
        now: Callable[[], float],
        application_exists: Callable[[], bool | None],
        is_used: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            lease_s: silence after which the application is asked for.
            now: a monotonic clock, in seconds.
            application_exists: asks the cluster; None where the answer cannot be had. It returns in bounded time.
            is_used: whether an ingress is connected.
        """
        self.lease_s = lease_s
        self._now, self._application_exists, self._is_used = now, application_exists, is_used
        self._renewed_s = now()
        self._num_unanswered = 0

    def renew(self) -> None:
        """A controller spoke."""
        self._renewed_s, self._num_unanswered = self._now(), 0

    def ended(self) -> bool:
        """Whether the instance should finish what it has and exit. Starts a new term where it should not."""
        if self._now() - self._renewed_s < self.lease_s:
            return False
        exists = self._application_exists()
        if exists is False:
            return True
        # A new controller may take a while, and so may a cluster that cannot be asked: ask again a lease later.
        self._renewed_s = self._now()
        self._num_unanswered = self._num_unanswered + 1 if exists is None and not self._is_used() else 0
        return self._num_unanswered >= MAX_UNANSWERED
