"""Which steps of an instance read little of prompts, because a change of shape waits for their end. Pure.

A switch begins when all its members have come to the end of a step, and a whole step takes long: a second for 8,192
tokens of a 70B model on an H200. So two kinds of steps read `1 / SHARE` of what a step can:

    first     of an instance that had nothing to do. The prompt that ends an idle time may be what the controller
              changes the shape for. The steps after it read all they can.
    meeting   of the leader of a switch, while the other members come to the end of theirs and stand still.

A short step costs as much as any other for reading the weights. So a prompt that fits into one step is read in one,
where no meeting is under way.
"""

SHARE = 16


def first_step_tokens(num_tokens: int, step_tokens: int) -> int | None:
    """The most tokens that the first step has; None: as many as it can.

    Args:
        num_tokens: of the prompt, that are not computed.
        step_tokens: that a step has at most.
    """
    return _little(step_tokens) if num_tokens > step_tokens else None


def meeting_step_tokens(num_decodes: int, step_tokens: int) -> int:
    """The most tokens that a step of a leader has while members meet: its decodes, and a little of prompts.

    Args:
        num_decodes: tokens of running requests that decode.
        step_tokens: that a step has at most.
    """
    return min(step_tokens, num_decodes + _little(step_tokens))


def _little(step_tokens: int) -> int:
    return max(1, step_tokens // SHARE)
