"""The random state of this process: requests without a seed draw from it."""

import torch


class RandomState:
    """As it was when this was made, on the CPU and on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def seed(self, seed: int) -> None:
        """Makes it what follows from `seed`.

        Not `torch.manual_seed`: for each kind of device that this process has never used, that keeps a call with its
        stack for later, at every call, and takes a millisecond.
        """
        torch.default_generator.manual_seed(seed)
        if self._cuda is not None:
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)

    def put_back(self) -> None:
        """Makes it so again."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
