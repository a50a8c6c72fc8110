"""Runs ray.serve.llm until it is interrupted. A program of its own: it runs in the other virtual environment."""

import json
import signal
import sys
import threading
from typing import Any

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app


def main(arguments: dict[str, Any]) -> None:
    """Starts a local Ray, deploys the application, waits for a signal, takes both down."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    # Logical CPUs, so that Ray places all replicas. Which cores they use is up to the kernel, as with the others.
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": arguments["port"]})
        config = LLMConfig(
            model_loading_config={"model_id": arguments["served_name"], "model_source": arguments["model"]},
            accelerator_config={"kind": "cpu"},
            deployment_config={"num_replicas": arguments["num_replicas"], "max_ongoing_requests": 256},
            engine_kwargs=arguments["engine"],
        )
        serve.run(build_openai_app({"llm_configs": [config]}), name="bench", route_prefix="/")
        stop.wait()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
