"""Batches whose KV is partly on the host while they decode, by request and layer, as in OrbitFlow's paper."""
