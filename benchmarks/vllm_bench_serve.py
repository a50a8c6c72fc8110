"""vLLM's own load tool against a running application: `python -m benchmarks.vllm_bench_serve --url http://127.0.0.1:8000`.

Ends with an error unless every request was answered.
"""

import argparse
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.harness import DEMO_MODEL

NUM_REQUESTS = 200


def run(url: str, served_name: str, tokenizer: Path, num_requests: int = NUM_REQUESTS) -> dict[str, Any]:
    """Sends random prompts (96 tokens in, 32 out, 16 at a time) to the chat route; vLLM's result."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    arguments = parser.parse_args(
        [
            *("--backend", "openai-chat", "--base-url", url, "--endpoint", "/v1/chat/completions"),
            *("--model", served_name, "--served-model-name", served_name, "--tokenizer", str(tokenizer)),
            *("--dataset-name", "random", "--random-input-len", "96", "--random-output-len", "32"),
            *("--num-prompts", str(num_requests), "--max-concurrency", "16", "--seed", "1"),
            *("--ignore-eos", "--disable-tqdm", "--percentile-metrics", "ttft,tpot,itl,e2el"),
        ]
    )
    return serve.main(arguments)


def served_model(url: str) -> str:
    """Name of the model that the application serves; the key is read from `OPENAI_API_KEY`, as the tool does."""
    headers = {"Authorization": f"Bearer {key}"} if (key := os.environ.get("OPENAI_API_KEY")) else {}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=headers), timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


def main() -> int:
    """Command line; the exit code."""
    parser = argparse.ArgumentParser(description="vLLM's serving benchmark against a running application.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--tokenizer", type=Path, default=DEMO_MODEL, help="directory of the served model")
    parser.add_argument("--num-requests", type=int, default=NUM_REQUESTS)
    options = parser.parse_args()
    result = run(options.url, served_model(options.url), options.tokenizer, options.num_requests)
    completed, failed = result["completed"], result["failed"]
    sys.stdout.write(f"{completed} completed, {failed} failed\n")
    return 0 if (completed, failed) == (options.num_requests, 0) else 1


if __name__ == "__main__":
    sys.exit(main())
