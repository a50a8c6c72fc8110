"""How much of a long prompt the first step of an instance reads that had nothing to do. Pure.

A change of shape waits for the end of the step that is under way. The prompt that ends an idle time may be what the
controller changes the shape for, and a whole step of it takes long: a second for 8,192 tokens of a 70B model on an
H200. So the first step reads `1 / SHARE` of what a step can, and the steps after it all they can.

It costs one step more, which reads the weights once more. So a prompt that fits into one step is read in one.
"""

SHARE = 16


def first_step_tokens(num_tokens: int, step_tokens: int) -> int | None:
    """The most tokens that the first step has; None: as many as it can.

    Args:
        num_tokens: of the prompt, that are not computed.
        step_tokens: that a step has at most.
    """
    return max(1, step_tokens // SHARE) if num_tokens > step_tokens else None
