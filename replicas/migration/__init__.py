"""Live migration: a request goes on at another instance, with its KV, while both serve."""
