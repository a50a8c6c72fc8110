"""Instances whose requests give way as another system lets them: what parking is compared with.

Who gives way, and when, is decided as in PengServe. vLLM itself is the comparison with recompute.
"""
