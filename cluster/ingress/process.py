"""What an ingress's process does once, when everything is built."""

from pengserve.cluster.ingress.vllm_openai_seam import enable_envs_cache, freeze_gc_heap


def settle() -> None:
    """Reads vLLM's variables for the last time, and takes start-up's objects out of the garbage collector's rounds.

    As vLLM's own server does. Every token asks for some variable, 4 % of an ingress's time otherwise.
    """
    enable_envs_cache()
    freeze_gc_heap()
