"""GPUs and models as data, with their sources."""
