"""Requests, KV and weights on their way when the shape changes: merges, splits, drops and restores."""
