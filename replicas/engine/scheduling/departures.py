"""How often a rule of ours departed from the order in which vLLM would have read prompts."""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Departures:
    """Totals, one for each rule. The rules of one scheduler share them (`SchedulerHandle.departures`)."""

    by_band: int = 0  # steps in which a prompt gave way to a more urgent one: `chunk_shares.py`
    by_length: int = 0  # steps in which a short prompt overtook a long one: `short_prompts.py`
    by_lateness: int = 0  # times that what waits was put in order because some are late: `late_prompts.py`
    by_memory: int = 0  # times that a long answer gave way to a prompt that waited for memory: `long_answers.py`
    first_steps: int = 0  # that were kept short: `short_steps.py`

    def named(self) -> dict[str, int]:
        """By their names in `InstanceStats`."""
        return {
            "total_departures_by_band": self.by_band,
            "total_departures_by_length": self.by_length,
            "total_departures_by_lateness": self.by_lateness,
            "total_departures_by_memory": self.by_memory,
            "total_short_first_steps": self.first_steps,
        }

    def count_from(self, other: "Departures") -> None:
        """The totals are those of `other` from now on."""
        for one in fields(self):
            setattr(self, one.name, getattr(other, one.name))
