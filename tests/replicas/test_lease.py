"""Law: an instance goes only after a silent lease, and only when its application is gone."""

from pengserve.replicas.lease import MAX_UNANSWERED, Lease


class World:
    def __init__(self) -> None:
        self.time_s, self.asked, self.is_used = 100.0, 0, False
        self.app_exists: bool | None = True

    def ask(self) -> bool | None:
        self.asked += 1
        return self.app_exists

    def lease(self) -> Lease:
        return Lease(30.0, now=lambda: self.time_s, application_exists=self.ask, is_used=lambda: self.is_used)


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


def lasts(world: World, lease: Lease, num_leases: int) -> int:
    """Leases in a row, of at most `num_leases`, until it has ended."""
    for number in range(num_leases):
        world.time_s += 31.0
        if lease.ended():
            return number + 1
    return num_leases + 1


def test_a_cluster_that_cannot_be_asked_does_not_keep_an_unused_instance_for_ever() -> None:
    world = World()
    lease = world.lease()
    world.app_exists = None
    assert lasts(world, lease, 100) == MAX_UNANSWERED


def test_while_ingresses_are_connected_no_missing_answer_ends_it() -> None:
    world = World()
    lease = world.lease()
    world.app_exists, world.is_used = None, True
    assert lasts(world, lease, 100) == 101
    world.is_used = False
    assert lasts(world, lease, 100) == MAX_UNANSWERED


def test_a_word_of_a_controller_or_an_answer_begins_the_count_anew() -> None:
    world = World()
    lease = world.lease()
    world.app_exists = None
    assert lasts(world, lease, MAX_UNANSWERED - 1) == MAX_UNANSWERED
    lease.renew()
    assert lasts(world, lease, MAX_UNANSWERED - 1) == MAX_UNANSWERED
    world.app_exists = True
    assert lasts(world, lease, 1) == 2
    world.app_exists = None
    assert lasts(world, lease, 100) == MAX_UNANSWERED
