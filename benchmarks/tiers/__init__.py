"""KV on device and host against plain vLLM: `python -m benchmarks.tiers`."""
