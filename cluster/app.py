"""The Serve application: `build` is what `serve deploy` and `pengserve up` run.

    import_path: pengserve.cluster.app:build
    args: {model: ..., instances: {count: 2}, ...}      the fields of `cluster.settings.Settings`; extras are refused

One deployment, `Ingress`, and beside it the deployment-scoped actor `controller`, which creates the instances.
vLLM is imported in the ingress replicas and the instances, never in the process that builds.
"""

import asyncio
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import DeploymentActorConfig

from pengserve.cluster import ray_safety, serve_name, start_failures
from pengserve.cluster.class_settings import service_classes
from pengserve.cluster.controller_actor import ControllerActor
from pengserve.cluster.fingerprint import fingerprinted
from pengserve.cluster.haproxy.launcher import proxy_remarks
from pengserve.cluster.ingress.config import IngressConfig, LimitConfig, OpenAIConfig
from pengserve.cluster.ingress.guards.security import harden, refuse_unsafe
from pengserve.cluster.ingress.logs import SERVE_LOGGER, log_with_serve
from pengserve.cluster.ingress.serve_front import IMPORT_PATH, VARIABLE
from pengserve.cluster.placement import cluster_devices, remarks, settle
from pengserve.cluster.preflight import setting_mistakes
from pengserve.cluster.serve_seam import ONE_LOOP, keep_inner_grpc_on_loopback
from pengserve.cluster.settings import Settings
from pengserve.cluster.settings_sources import parse_settings
from pengserve.controller.ray_shell import channel_token
from pengserve.planners.types.codec import to_data
from pengserve.planners.types.config import InstanceConfig
from pengserve.planners.types.errors import ConfigError
from pengserve.replicas.environment import process_environment

CONTROLLER = "controller"
MAX_ONGOING_REQUESTS = 10_000  # the ingress itself answers 429, in OpenAI's shape and with Retry-After
MAX_WAIT_FOR_INSTANCE_S = 300.0
SHUTDOWN_MARGIN_S = 15.0
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 5.0, 30.0


@serve.ingress(None)
class Ingress:
    """One ingress replica. Serve's HTTP proxy, or HAProxy directly, talks to the ASGI application it builds."""

    def __init__(self, config: IngressConfig, app: str) -> None:
        """`app` is the name in the settings; empty where they leave it to Serve."""
        log_with_serve()
        keep_inner_grpc_on_loopback()
        self._config, self._app_name = config, serve.get_replica_context().app_name
        with start_failures.told_at_once(self._app_name):
            serve_name.agreed(app, self._app_name)
            ray_safety.refuse_open_ray()
            host = ray_safety.serve_http_host()  # the settings may name another one
            ray_safety.refuse_open_serve(host, has_keys=config.has_api_keys)
            self._config = replace(config, host=host)
            harden(self._config)
        for remark in proxy_remarks(os.environ):
            logging.getLogger(SERVE_LOGGER).warning("%s", remark)
        self._ingress: Any = None

    async def __serve_build_asgi_app__(self) -> Any:
        with start_failures.told_at_once(self._app_name):
            return await self._build_asgi_app()

    async def _build_asgi_app(self) -> Any:
        # vLLM reads its environment at import, and `harden` has just set it.
        from pengserve.cluster.ingress.api import IngressRuntime
        from pengserve.cluster.ingress.process import settle
        from pengserve.cluster.ingress.routing.ray_source import RayRoutingSource
        from pengserve.cluster.metrics.facade import Metrics

        token = await asyncio.to_thread(channel_token, self._app_name)
        config = replace(self._config, instance=replace(self._config.instance, channel_token=token))
        metrics = Metrics(config.metrics_backend, app=self._app_name, num_ingresses=config.num_ingresses)
        source = RayRoutingSource(lambda: serve.get_deployment_actor(CONTROLLER))
        self._ingress = IngressRuntime(config, source, metrics, metrics.exposition)
        asgi_app = await self._ingress.build_app()
        settle()
        return asgi_app

    def check_health(self) -> None:
        """Serve replaces the replica where this raises."""
        if self._ingress is not None and self._ingress.is_dead:
            raise RuntimeError("the ingress's tasks have ended")


def build(args: dict[str, Any]) -> serve.Application:
    """The application for `args`, the data of `Settings`: what `serve deploy` calls.

    Raises:
        ConfigError: as `application`, or the cluster's Ray asks for no token.
    """
    ray_safety.refuse_open_ray()
    settings = parse_settings(args)
    if fields := settings.security.given_in_the_open:
        logging.getLogger(SERVE_LOGGER).warning(
            "%s: Ray's dashboard and `serve config` show the arguments of an application; put keys into files and name"
            " those (security.api_keys_file, admin_key_file, metrics_key_file)",
            ", ".join(fields),
        )
    # Where `app` is left out it is Serve's name, which a builder is not told.
    return application(settings, settings.app if "app" in args else "")


def application(settings: Settings, app: str) -> serve.Application:
    """The application for `settings`. `app` is the name that Serve must have for it; empty: any name.

    Raises:
        ConfigError: names the key, and what would be accepted; also where the Ray cluster has fewer devices than
            `instances.count` needs.
    """
    if found := list(setting_mistakes(settings)):
        raise ConfigError("; ".join(found))
    settings = settle(settings, cluster_devices, settings.instances.wait_for_devices_s)
    for remark in remarks(settings):
        logging.getLogger(SERVE_LOGGER).warning("%s", remark)
    instance = fingerprinted(instance_config(settings))
    ingress = ingress_config(settings, instance)
    refuse_unsafe(ingress)
    environment = process_environment(instance)
    controller = DeploymentActorConfig(
        name=CONTROLLER,
        actor_class=ray.remote(ControllerActor),
        init_kwargs={
            "config": to_data(replace(settings.controller_config(), app=app)),
            "instance_config": to_data(replace(instance, app=app)),
        },
        actor_options={"num_cpus": 0},
    )
    deployment = serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=settings.http.ingress_replicas,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={
            "num_cpus": 0 if settings.device == "cpu" else 1,
            # What listens on loopback is of use on the machine that users are on: the head.
            "resources": {"node:__internal_head__": 0.001} if ingress.is_loopback else {},
            "runtime_env": {"env_vars": {**environment, **ONE_LOOP, "OMP_NUM_THREADS": "1", VARIABLE: IMPORT_PATH}},
        },
        graceful_shutdown_timeout_s=settings.controller.drain_timeout_s + SHUTDOWN_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        logging_config={"enable_access_log": False},
        deployment_actors=[controller],
    )
    return deployment.bind(ingress, app)


def instance_config(settings: Settings) -> InstanceConfig:
    """What instances are started with, but for the channel's secret.

    The engine needs the reasoning parser to hold a grammar back until the answer.

    Raises:
        ConfigError: the parser is named in two ways.
    """
    config = settings.instance_config("")
    parser = settings.openai.reasoning_parser
    if parser is None:
        return config
    if config.engine.get("reasoning_parser", parser) != parser:
        raise ConfigError("openai.reasoning_parser and engine.reasoning_parser differ: keep the first")
    return replace(config, engine={**config.engine, "reasoning_parser": parser})


def ingress_config(settings: Settings, instance: InstanceConfig) -> IngressConfig:
    """What ingresses are started with."""
    limits, openai = settings.limits, settings.openai
    security = settings.security.to_args()
    return IngressConfig(
        instance=instance,
        num_instances=settings.num_instances,
        num_ingresses=settings.http.ingress_replicas,
        served_model_names=tuple(settings.served_model_name),
        host=settings.http.host,
        allowed_origins=tuple(settings.http.allowed_origins),
        api_keys=tuple(security.pop("api_keys")),
        is_tenant_trusted=security.pop("trust_tenant_header"),
        classes=service_classes(settings.classes),
        fairness=settings.fairness.config(settings.http.ingress_replicas),
        **{name: value or "" for name, value in security.items()},
        limits=LimitConfig(
            max_body_bytes=limits.max_body_bytes,
            max_n=limits.max_n,
            max_stop_strings=limits.max_stop_strings,
            compile_cpu_s=limits.compile_cpu_s,
            allow_grammars=limits.allow_grammars,
            max_queued_requests=limits.max_queued_requests,
            request_timeout_s=limits.request_timeout_s,
            parallelism_wait_s=limits.parallelism_wait_s,
            max_prefix_entries=limits.max_prefix_entries if instance.engine.get("enable_prefix_caching", True) else 0,
            no_instance_timeout_s=min(settings.controller.start_timeout_s, MAX_WAIT_FOR_INSTANCE_S),
        ),
        openai=OpenAIConfig(
            chat_template=_template(openai.chat_template),
            tool_call_parser=openai.tool_call_parser,
            enable_auto_tool_choice=openai.enable_auto_tool_choice,
            reasoning_parser=openai.reasoning_parser,
        ),
        metrics_backend=settings.metrics.backend,
        request_log=settings.request_log,
        otlp_endpoint=settings.traces.otlp_endpoint,
        trace_sample_ratio=settings.traces.sample_ratio,
        log_max_bytes=settings.log_max_bytes,
        log_num_older=settings.log_num_older,
        is_id_echoed=True,
    )


def _template(chat_template: str | None) -> str | None:
    """The template's text: the file may not exist on the ingress's machine."""
    if chat_template and len(chat_template) < 4096 and Path(chat_template).is_file():
        return Path(chat_template).read_text(encoding="utf-8")
    return chat_template
