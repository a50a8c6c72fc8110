"""Instances whose requests give way as other systems let them: what parking is compared with.

Who gives way, and when, is decided as in PengServe.
"""
