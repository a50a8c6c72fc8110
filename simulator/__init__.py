"""The cluster in virtual time: the production controller, planners and vLLM's scheduler; only the GPUs are a model."""
