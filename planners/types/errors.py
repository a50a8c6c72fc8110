"""Every error PengServe raises on purpose.

    PengServeError
    +-- ConfigError              the user's configuration cannot work; nothing was started
    +-- PlanError                a plan was refused; nothing was applied
    +-- StepError                a step of a transition failed; the undo is possible
    |   +-- FenceError           the message carries a stale epoch or term; the receiver changed nothing
    +-- EngineError              an engine or its instance failed
    |   +-- SupersededError      a controller of a newer term has taken over; ask that one
    |   +-- LinkLostError        the connection to an instance broke; its requests must be resumed elsewhere
    |   +-- HostTierError        KV can no longer be copied between device and host; the device alone serves on
    +-- UnsupportedShapeError    this model or device cannot run that shape; other shapes still work

`assert` is for programmers' mistakes; these are for everything the world can do.
"""


def one_line(error: BaseException) -> str:
    """What an error says, in one line for people: a deliberate one its sentence, any other its type and first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else "it says no more"
    return first if isinstance(error, PengServeError) and lines else f"{type(error).__name__}: {first}"


class PengServeError(Exception):
    """Root of all deliberate errors. The message is one clear sentence that says what to do next."""


class ConfigError(PengServeError):
    """The configuration cannot work. Names the field and, where it helps, the accepted values."""


class PlanError(PengServeError):
    """A plan violates a law of `planners.check` and was refused before anything was applied."""


class StepError(PengServeError):
    """A prepare or commit step failed; the coordinator aborts and the layout before stands."""


class FenceError(StepError):
    """A message with a stale epoch, or of a controller with a stale term, arrived and was ignored."""


class EngineError(PengServeError):
    """An engine failed. Its requests can be resumed on another instance."""


class SupersededError(EngineError):
    """A controller of a newer term has taken over; this one knows nothing any more. Ask that one."""


class LinkLostError(EngineError):
    """The channel to an instance closed. Tokens it had not delivered are generated again elsewhere."""


class HostTierError(EngineError):
    """A copy between device and host has failed, and what waited for it cannot go on. The host tier ends with it."""


class UnsupportedShapeError(PengServeError):
    """A lane cannot be built for this model or device. Raised at start-up, for that lane alone."""
