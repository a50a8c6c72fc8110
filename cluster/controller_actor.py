"""The controller as Serve starts it: with plain data and no secrets, for Serve shows arguments on its dashboard."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pengserve.cluster import start_failures
from pengserve.controller import ray_shell
from pengserve.planners.types.codec import from_data
from pengserve.planners.types.config import ControllerConfig, InstanceConfig
from pengserve.replicas.actor import InstanceActor
from pengserve.replicas.environment import process_environment


class ControllerActor(ray_shell.ControllerActor):
    """Brings the two floors together that do not know each other: a controller, and the instances it creates."""

    def __init__(self, config: Mapping[str, Any], instance_config: Mapping[str, Any]) -> None:
        """Both are `planners.types.codec.to_data` of the values of that name."""
        controller = from_data(ControllerConfig, config)
        instance = from_data(InstanceConfig, instance_config)
        instance = replace(instance, channel_token=ray_shell.channel_token(controller.app))
        with start_failures.told_at_once(controller.app):
            super().__init__(controller, instance, InstanceActor, process_environment(instance))
