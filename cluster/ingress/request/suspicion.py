"""How much speaks for it that one request kills the instances that compute it."""

from dataclasses import dataclass

from pengserve.replicas.trial_gate import PROVEN_TOKENS

SUSPECTS_PER_TRIAL = 12  # of so many requests that may have caused a death, one a time goes on each instance


@dataclass(slots=True)
class Suspicion:
    """The deaths of instances that one request may have caused.

    A death counts for the requests that may have caused it: those on trial there, or else those that the instance had
    begun and not computed for `PROVEN_TOKENS`, or else all that it ran. Each `PROVEN_TOKENS` computed since take one
    death off.
    """

    num_deaths: int = 0
    num_alone: int = 0  # deaths of which this request was the only possible cause
    num_together: int = 0  # requests that may have caused the newest death, this one among them
    num_tokens: int = 0  # output tokens of the request that are counted: at the newest death, then by `decay`
    was_proven: bool = False  # the instance had computed it for `PROVEN_TOKENS` before the newest death
    num_aboard: int = 0  # deaths of instances that ran this request, since the first that counts
    evidence_before: int = 0  # deaths less acquittals that the ingress knew before the first that counts

    def note(self, *, num_together: int, is_alone: bool, was_proven: bool, num_tokens: int) -> None:
        """An instance died, and this request is one of `num_together` that may have caused it."""
        self.decay(num_tokens)
        self.num_deaths += 1
        self.num_alone += is_alone
        self.num_together, self.num_tokens, self.was_proven = num_together, num_tokens, was_proven

    def decay(self, num_tokens: int) -> None:
        """Takes deaths off for the output tokens that were computed since the newest one."""
        num_passed = (num_tokens - self.num_tokens) // PROVEN_TOKENS
        self.num_tokens += num_passed * PROVEN_TOKENS
        self.num_deaths = max(0, self.num_deaths - num_passed)
        self.num_alone = max(0, self.num_alone - num_passed)

    @property
    def needs_trial(self) -> bool:
        """Whether the next instance must be one where a further death tells more.

        The first death of a request that ran well before is most likely no fault of it: it goes on at once anywhere.
        """
        return self.num_deaths > 1 or (self.num_deaths == 1 and not self.was_proven)

    @property
    def most_together(self) -> int:
        """How many suspects, this one among them, may be on trial on one instance at once."""
        return max(1, self.num_together // SUSPECTS_PER_TRIAL)

    def is_guilty(self, evidence: int, max_deaths_alone: int) -> bool:
        """Whether the request kills instances; `evidence` is the ingress's count of deaths less acquittals now.

        Instances that die without the request, while suspects die rather than be acquitted, have another cause.
        """
        num_unrelated = max(0, evidence - self.evidence_before - self.num_aboard)
        return self.num_alone >= max_deaths_alone and self.num_alone > num_unrelated
