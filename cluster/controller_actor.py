"""The controller as Serve starts it: with plain data and no secrets, for Serve shows arguments on its dashboard."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray import serve

from pengserve.cluster import serve_name, start_failures
from pengserve.controller import ray_shell
from pengserve.planners.types.codec import from_data
from pengserve.planners.types.config import ControllerConfig, InstanceConfig
from pengserve.replicas.actor import InstanceActor
from pengserve.replicas.environment import process_environment


class ControllerActor(ray_shell.ControllerShell):
    """Brings the two floors together that do not know each other: a controller, and the instances it creates."""

    def __init__(self, config: Mapping[str, Any], instance_config: Mapping[str, Any]) -> None:
        """Both are `planners.types.codec.to_data` of the values of that name; an empty `app` is Serve's name for it."""
        controller = from_data(ControllerConfig, config)
        instance = from_data(InstanceConfig, instance_config)
        app = serve.get_deployment_actor_context().app_name
        with start_failures.told_at_once(app):
            serve_name.agreed(controller.app, app)
            controller = replace(controller, app=app)
            instance = replace(instance, app=app, channel_token=ray_shell.channel_token(app))
            super().__init__(controller, instance, InstanceActor, process_environment(instance))
