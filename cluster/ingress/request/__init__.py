"""One request: what it asks for, what an ingress keeps of it, and what was kept of its latencies."""
