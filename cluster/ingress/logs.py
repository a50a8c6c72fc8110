"""Where an ingress's log lines go: into Serve's log of its replica, each with its level."""

import logging
import os

SERVE_LOGGER = "ray.serve"


def log_with_serve() -> None:
    """Sends what anything in this process logs to Serve's handlers. Call before vLLM is imported.

    Left alone, vLLM configures logging anew, and with that closes Serve's handlers: not a line is logged any more.
    """
    os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
    logging.basicConfig(level=logging.INFO, handlers=logging.getLogger(SERVE_LOGGER).handlers or None)
    logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "INFO"))
