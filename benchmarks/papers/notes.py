"""What had to be assumed for each scenario, and why figures do not come out; one sentence or two each."""

from collections.abc import Mapping

ASSUMED: Mapping[str, tuple[str, ...]] = {
    "kunserve-14b-burstgpt": (),
    "kunserve-14b-azure-lengths": (),
    "kunserve-14b-longbench": (),
    "kunserve-72b-extreme-burst": (),
    "flying-70b-bursty": (),
    "flying-70b-priority": (),
}

REASONS: Mapping[str, tuple[str, ...]] = {name: () for name in ASSUMED}
