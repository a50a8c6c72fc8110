"""Instances with a host tier, from which FastSwitch's parts are left out one by one: what parking is compared with.

    swap       a step waits for copies; a block is a copy; what comes back has no copy on the host any more: vLLM 0.x
    overlap    copies go beside the steps
    runs       ... and neighbours are one copy (section 3.1, block groups)
    park       ... and copies on the host stay (section 3.3): PengServe as it is

Who gives way, and when, is decided as in PengServe. vLLM itself is the comparison with recompute. All of them count
what they take of a step's time (`call_times.py`).
"""
