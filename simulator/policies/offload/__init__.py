"""Policies of OrbitFlow's evaluation (section 5.1): which layers of a batch's KV are on the host while it decodes."""
