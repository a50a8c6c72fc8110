"""What must be true when everything has healed. Laws of every single event are checked where it happens."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pengserve.planners.types.errors import EngineError
from pengserve.planners.types.snapshot import InstanceState

if TYPE_CHECKING:
    from tests.world.world import World

MOST_DEATHS_BY_POISON = 3  # lives that one bad request may end: the first one beside others, two in trials
MOST_DEATHS_ALONE = 2  # the same, where it had each instance for itself, and its ingress has all of them
MOST_DEATHS_IN_A_STORM = 4  # the same, where a trial may be cut short


def unfinished(world: "World") -> Iterator[str]:
    """What a healed world still has to come to, as sentences; none where it is at rest."""
    for ingress in world.ingresses.values():
        for number in ingress.seen:
            if number not in ingress.ends:
                yield f"request {number} of {ingress.name} hangs after {len(ingress.seen[number])} tokens"
        for name, value in ingress.memory().items():
            yield f"{ingress.name} still holds {name}: {list(value)}"
        for task in ingress.tasks:
            if task.done():
                yield f"the task {task.get_name()} of {ingress.name} has ended"
    yield from _controllers(world)
    for instance in world.cluster.living():
        for wire_id in instance.copies:
            yield f"instance {instance.key} still computes {wire_id}"


def _controllers(world: "World") -> Iterator[str]:
    acting = [process for process in world.controllers.living() if process.acts]
    if len(acting) != 1:
        yield f"{len(acting)} controllers act"
        return
    for process in world.controllers.living():
        if not process.acts and process.num_stops != 1:
            yield f"a controller said {process.num_stops} times that it stops"
    try:
        state = acting[0].controller.state()
    except EngineError as error:
        yield str(error)
        return
    yield from (f"slot {slot.key} is {slot.state}" for slot in state.slots if slot.state is not InstanceState.READY)
    yield from (f"instance {key} waits to be killed" for slot in state.slots for key in slot.doomed)
    yield from (f"instance {key} is a stray" for key in state.strays)
    keys = {slot.key for slot in state.slots}
    yield from (f"instance {i.key} lives beside its slot" for i in world.cluster.living() if i.key not in keys)
    if world.cluster.reserved != keys:
        yield f"reserved are {sorted(world.cluster.reserved)}, and slots hold {sorted(keys)}"
    yield from (f"the switch {plan.plan_id} is still under way" for plan in state.switches)
    for ingress in world.ingresses.values():
        if ingress.watcher.table.version != state.routing.version:
            yield f"{ingress.name} has routes {ingress.watcher.table.version}, and there are {state.routing.version}"
        linked = set(ingress.links._links)
        if linked != keys:
            yield f"{ingress.name} has links to {sorted(linked)}, and slots hold {sorted(keys)}"


def _most_deaths(world: "World", number: int) -> int:
    """Lives that the poisonous request `number` may end."""
    if world.scenario.faults:
        return MOST_DEATHS_IN_A_STORM
    if world.scenario.num_ingresses == 1 and not world.answers.company[number]:
        return MOST_DEATHS_ALONE
    return MOST_DEATHS_BY_POISON


def broken_at_the_end(world: "World") -> Iterator[str]:
    """Laws of the whole run."""
    for number, keys in world.answers.deaths.items():
        if len(keys) > _most_deaths(world, number):
            yield f"request {number} has ended {len(keys)} instances: {', '.join(map(str, keys))}"
    if world.answers.num_other_deaths > 1:
        return  # an instance may die by chance under one request twice, and that one is condemned
    for ingress in [*world.ingresses.values(), *world.dead_ingresses]:
        for number, how in ingress.ends.items():
            if "PoisonousRequestError" in how and number not in world.scenario.poison:
                yield f"request {number} was condemned for the deaths of others"
