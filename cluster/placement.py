"""What becomes of the settings on the devices that are there: how many instances, or a refusal in one sentence.

`pengserve up` asks its machine, `up --detach` and the Serve builder ask the Ray cluster. On CPUs nothing is asked.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from pengserve.cluster.devices import count_cuda_devices
from pengserve.cluster.settings import Settings
from pengserve.cluster.settings_sources import parse_settings
from pengserve.planners.types.errors import ConfigError

logger = logging.getLogger(__name__)

_POLL_PERIOD_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """CUDA devices that instances can have."""

    where: str  # "on this machine"
    by_node: tuple[float, ...]  # an instance has all of its devices on one node

    @property
    def total(self) -> int:
        """Devices of all nodes."""
        return int(sum(self.by_node))

    def num_instances(self, gpus_each: float) -> int:
        """Instances that there is room for, where each has `gpus_each` devices, which is not 0."""
        return sum(int(num_devices / gpus_each + 1e-6) for num_devices in self.by_node)


def local_devices() -> Devices:
    """Those of this machine."""
    return Devices(where="on this machine", by_node=(float(count_cuda_devices()),))


def cluster_devices() -> Devices:
    """Devices of the Ray cluster that this process is connected to.

    Raises:
        ConfigError: this process is connected to none, or the cluster gives no answer.
    """
    import ray

    try:
        if not ray.is_initialized():
            raise ConnectionError("this process is connected to no Ray cluster")
        nodes = ray.nodes()
    except Exception as error:
        raise _CannotAsk(
            f"the Ray cluster cannot be asked for its GPUs ({error}): set instances.count to the number of instances"
            " that it has GPUs for"
        ) from error
    return Devices(
        where="in the Ray cluster", by_node=tuple(node["Resources"].get("GPU", 0.0) for node in nodes if node["Alive"])
    )


def settle(settings: Settings, ask: Callable[[], Devices], patience_s: float = 0.0) -> Settings:
    """`settings` with a number of instances that the devices can hold.

    Args:
        ask: how many devices there are; called where the instances run on CUDA.
        patience_s: asks again for so long while there are not enough.

    Raises:
        ConfigError: there are fewer devices than `instances.count` needs, or none, or no answer.
    """
    if settings.device == "cpu":
        return _with_count(settings, settings.num_instances)
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            return _with_count(settings, _count(settings, ask()))
        except _CannotAsk as error:
            if settings.instances.count == "auto":
                raise
            logger.warning("instances.count of %d is not checked: %s", settings.instances.count, error)
            return settings
        except _TooFewDevices as error:
            if time.monotonic() >= deadline_s:
                raise
            logger.info("waiting for devices: %s", error)
        time.sleep(_POLL_PERIOD_S)


def remarks(settings: Settings) -> tuple[str, ...]:
    """What a user of these settings should know at the start, a sentence each."""
    if settings.device == "cuda" and settings.may_change_shape:
        return (
            "shape.cuda is experimental: changes of shape have run on one GPU and not between GPUs,"
            " so try it before you rely on it",
        )
    if settings.shape.degrees == []:
        return ()
    if settings.device == "cuda" and settings.shape.cuda == "off":
        return (
            "instances on CUDA keep their shape, because changes of shape have not run between GPUs yet;"
            " `shape.cuda: experimental` lets them change it",
        )
    if settings.num_workers > 1:
        return (
            f"instances keep their shape (shape.degrees: auto means none here), because {settings.parallel_setting}"
            " gives their engines more than one process",
        )
    return ()


class _CannotAsk(ConfigError):
    """The Ray cluster gives no answer."""


class _TooFewDevices(ConfigError):
    """There are fewer devices than instances need; more may come."""


def _count(settings: Settings, devices: Devices) -> int:
    wanted, gpus_each = settings.instances.count, settings.gpus_per_instance
    if not gpus_each and wanted != "auto":
        return wanted  # Ray reserves no device for these instances, so there is nothing to count
    room = devices.num_instances(gpus_each or 1.0)
    seen = f"{_number(devices.total, 'CUDA device')} {_are(devices.total)} visible {devices.where}"
    if devices.total < 1:
        raise _TooFewDevices(
            f"instances.count is {wanted}, and {seen}: make devices visible (`nvidia-smi` and CUDA_VISIBLE_DEVICES say"
            " which are), or set instances.device to cpu"
        )
    if room == 0:
        raise _TooFewDevices(
            f"instances.count is {wanted}, an instance needs {gpus_each:g} CUDA devices of one machine"
            f" ({settings.parallel_setting}), and {seen}: lower {settings.parallel_setting}"
        )
    if wanted == "auto":
        return room
    if wanted > room:
        each = "" if gpus_each == 1 else f" for instances of {gpus_each:g}"
        raise _TooFewDevices(
            f"instances.count is {wanted}, and {seen}{each}: set instances.count to auto or to {room} at most, or make"
            " more devices visible"
        )
    return wanted


def _with_count(settings: Settings, count: int) -> Settings:
    data = settings.to_args()
    data["instances"]["count"] = count
    return parse_settings(data)


def _number(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
