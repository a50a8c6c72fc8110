"""Law: an instance goes only after a silent lease, and only when its application is gone."""

from pengserve.replicas.lease import Lease


class World:
    def __init__(self) -> None:
        self.time_s, self.app_exists, self.asked = 100.0, True, 0

    def ask(self) -> bool:
        self.asked += 1
        return self.app_exists

    def lease(self) -> Lease:
        return Lease(30.0, now=lambda: self.time_s, application_exists=self.ask)


def test_application_is_not_asked_for_within_the_lease() -> None:
    world = World()
    lease = world.lease()
    world.app_exists = False
    world.time_s += 29.0
    lease.renew()
    world.time_s += 29.0
    assert not lease.ended()
    assert world.asked == 0


def test_silence_alone_ends_nothing() -> None:
    world = World()
    lease = world.lease()
    world.time_s += 31.0
    assert not lease.ended()
    assert not lease.ended(), "the next question comes a lease later"
    assert world.asked == 1


def test_silence_and_a_gone_application_end_it() -> None:
    world = World()
    lease = world.lease()
    world.app_exists = False
    world.time_s += 31.0
    assert lease.ended()
