"""Instances: one GPU or CPU slot each, hosting one vLLM engine. Mechanisms only; they know no policy."""
