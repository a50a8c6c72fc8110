"""The ingress: vLLM's own OpenAI layer over the cluster's instances, and the limits in front of it."""
