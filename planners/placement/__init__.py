"""Which layers of each decoding request's KV are on the host: OrbitFlow's placement planner, section 3.3 and 3.4."""
