"""vLLM's OpenAI serving objects over a `ClusterEngineClient`, with the server's choices made once."""

import inspect
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from pengserve.cluster.ingress.config import IngressConfig
from pengserve.cluster.ingress.engine_client import ClusterEngineClient
from pengserve.cluster.ingress.errors import RequestRefused, guard_serving
from pengserve.cluster.ingress.leaving import ends_with_client
from pengserve.cluster.ingress.slo.usage import tell_what_was_kept
from pengserve.cluster.ingress.vllm_openai_seam import (
    AsyncEngineArgs,
    BaseModelPath,
    OnlineRenderer,
    OpenAIServingChat,
    OpenAIServingCompletion,
    OpenAIServingModels,
    OpenAIServingResponses,
    ServingTokenization,
    UsageContext,
    VllmConfig,
    chat_router,
    completion_router,
    load_chat_template,
    models_router,
    responses_router,
    tokenize_router,
)
from pengserve.replicas.engine.lanes.dp_lane import engine_arguments

MAX_NAME_CHARS = 128  # of an unknown model's name in the answer

ROUTES = frozenset(
    {
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
    }
)
"""What of vLLM's routers is served. Anything an upgrade adds to them stays closed until it is named here."""


def make_vllm_config(config: IngressConfig) -> VllmConfig:
    """The configuration that an instance makes from the same arguments; no engine is built from it here.

    Raises:
        ConfigError: an engine argument is not usable.
    """
    arguments = {**engine_arguments(config.instance), "served_model_name": list(served_names(config))}
    return AsyncEngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)


def served_names(config: IngressConfig) -> tuple[str, ...]:
    """Names that requests may put into `model`."""
    return config.served_model_names or (config.instance.model,)


async def attach(app: FastAPI, client: ClusterEngineClient, config: IngressConfig) -> None:
    """Puts the serving objects into `app.state`, where vLLM's routes look for them, and includes those routes."""
    tell_what_was_kept()
    template = load_chat_template(config.openai.chat_template)
    rendering: dict[str, Any] = {
        "request_logger": None,
        "chat_template": template,
        "chat_template_content_format": "auto",
    }
    parsing: dict[str, Any] = {
        "enable_auto_tools": config.openai.enable_auto_tool_choice,
        "tool_parser": config.openai.tool_call_parser,
        "reasoning_parser": config.openai.reasoning_parser or "",
    }
    models = OpenAIServingModels(
        engine_client=client,
        base_model_paths=[BaseModelPath(name=name, model_path=name) for name in served_names(config)],
    )
    await models.init_static_loras()
    renderer = OnlineRenderer(
        model_config=client.model_config,
        renderer=client.renderer,
        trust_request_chat_template=False,
        trust_request_mm_kwargs=False,
        **rendering,
        **parsing,
    )
    renderer.warmup()
    completion = OpenAIServingCompletion(client, models, online_renderer=renderer, request_logger=None)
    chat = OpenAIServingChat(client, models, "assistant", online_renderer=renderer, **rendering, **parsing)
    responses = OpenAIServingResponses(client, models, renderer, tool_server=None, **rendering, **parsing)
    tokenization = ServingTokenization(models, renderer, **rendering)
    for serving in (renderer, completion, chat, responses, tokenization):
        guard_serving(serving)
    for serving, param in ((completion, "prompt"), (chat, "messages"), (responses, "input")):
        _refuse_full_prompts(serving, client, param)
    state = app.state
    state.args = SimpleNamespace(log_error_stack=False)
    state.engine_client, state.vllm_config = client, client.vllm_config
    state.openai_serving_models, state.online_renderer = models, renderer
    state.openai_serving_completion, state.openai_serving_chat = completion, chat
    state.openai_serving_responses, state.serving_tokenization = responses, tokenization
    for router in (models_router, chat_router, completion_router, responses_router, tokenize_router):
        for route in router.routes:
            if isinstance(route, APIRoute) and any((method, route.path) in ROUTES for method in route.methods):
                assert inspect.iscoroutinefunction(route.endpoint)
                app.router.routes.append(_ending_with_client(route) if "POST" in route.methods else route)
    _attach_model_route(app, models)


def _ending_with_client(route: APIRoute) -> APIRoute:
    return APIRoute(
        route.path,
        ends_with_client(route.endpoint),
        methods=list(route.methods),
        dependencies=route.dependencies,
        response_model=None,
    )


def _attach_model_route(app: FastAPI, models: OpenAIServingModels) -> None:
    """`GET /v1/models/{id}`, which vLLM does not have. Names may hold slashes."""

    @app.get("/v1/models/{model_id:path}")
    async def show_model(model_id: str) -> JSONResponse:
        for card in (await models.show_available_models()).data:
            if card.id == model_id:
                return JSONResponse(card.model_dump())
        raise RequestRefused(404, f"The model `{model_id[:MAX_NAME_CHARS]}` does not exist.", param="model")


def _refuse_full_prompts(serving: Any, client: ClusterEngineClient, param: str) -> None:
    """Makes one of vLLM's serving objects say what is wrong where a prompt leaves no room for a token of output.

    vLLM gives such a request the rest of the context, which is nothing, as `max_tokens`, and then complains about that.
    The same is where a prompt's tokens are known and nothing of an answer has gone: here an SLO may refuse it.
    """
    extract = serving._extract_prompt_len

    def extract_prompt_len(prompt: Any) -> int:
        num_tokens, most = int(extract(prompt)), client.model_config.max_model_len
        if num_tokens >= most:
            raise RequestRefused(
                400,
                f"The prompt has {num_tokens} tokens, and the model takes at most {most} including at least one token"
                f" of output: shorten the prompt to at most {most - 1} tokens.",
                param=param,
            )
        client.require_slo(prompt)
        return num_tokens

    serving._extract_prompt_len = extract_prompt_len
