"""How many cases property tests try: few in the profile `ci`, which `make check` uses, all of them in `long`.

@settings(max_examples=examples(600))      # 100 in `ci`, 600 with `pytest --hypothesis-profile=long`
"""

from hypothesis import HealthCheck, settings

CI, LONG = "ci", "long"
_SHARE = 6  # of the long profile's cases, one of so many is tried in `ci`
_FEWEST = 10


def register_profiles() -> None:
    """Makes both profiles known to Hypothesis; `ci` is the default. Tests are never failed for being slow."""
    for name, max_examples in ((CI, 20), (LONG, 100)):
        settings.register_profile(
            name, max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
    settings.load_profile(CI)


def is_long() -> bool:
    """Whether the long profile is in use."""
    return settings.get_current_profile_name() == LONG


def examples(long: int) -> int:
    """The number of cases for the profile in use, for a test that tries `long` of them in the long one."""
    return long if is_long() else max(_FEWEST, long // _SHARE)
