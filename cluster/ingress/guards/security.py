"""What the ingress refuses to start with, and the environment it starts vLLM's OpenAI layer in."""

import os

from pengserve.cluster.ingress.config import IngressConfig
from pengserve.cluster.security_settings import MAKE_A_KEY
from pengserve.cluster.settings_sources import refuse_unsafe_environment
from pengserve.planners.types.errors import ConfigError

MAX_SEQUENCES_PER_REQUEST = 128  # prompts of a list times n


def refuse_unsafe(config: IngressConfig) -> None:
    """Checks `config` and the environment.

    Raises:
        ConfigError: vLLM's development mode or insecure serialisation is on, or other machines can reach an ingress
            that asks for no key, or an API has keys and the cluster's routes have none.
    """
    refuse_unsafe_environment()
    if not config.is_loopback and not config.has_api_keys:
        raise ConfigError(
            f"http.host {config.host!r} can be reached from other machines, so security.api_keys must hold at least"
            " one key; or use 127.0.0.1"
        )
    if config.has_api_keys and not (config.admin_key or config.admin_key_file):
        raise ConfigError(f"security.admin_key is missing: with API keys, /cluster/... needs its own; {MAKE_A_KEY}")


def harden(config: IngressConfig) -> None:
    """`refuse_unsafe`, then closes vLLM's open doors in this process. Call before vLLM is imported."""
    refuse_unsafe(config)
    # A redirect would lead a media fetch past the list of allowed hosts.
    os.environ["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] = "0"
    os.environ["VLLM_MAX_N_SEQUENCES"] = str(min(MAX_SEQUENCES_PER_REQUEST, config.limits.max_n))
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_DO_NOT_TRACK", "1")
    # LoRA adapters loaded on request, and any model name accepted: both would widen what a client can reach.
    os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "0"
    os.environ["VLLM_SKIP_MODEL_NAME_VALIDATION"] = "0"
    # Stored responses stay in memory for good, no route reads them, and background ones run on without a client.
    os.environ["VLLM_ENABLE_RESPONSES_API_STORE"] = "0"
