"""The term of a controller: which of several controllers of one application counts.

Each controller takes the next number from a store that all of them share. The highest number counts. Instances refuse
orders of an older term, ingresses refuse its routing tables, and a controller that learns of a newer one ends its loop.
No clock is involved: a wall clock may be set back between two controllers.
"""

from typing import Protocol


class TermStore(Protocol):
    """Where the controllers of one application draw their terms. Outlives each of them."""

    async def claim(self, above: int) -> int:
        """A number above `above` and above all that were claimed before. No two calls return the same one."""
        ...

    async def newest(self) -> int:
        """The highest number that was claimed; 0 where none was."""
        ...

    async def live(self, sign: str) -> None:
        """The newest controller still acts: keeps `sign`, which differs from the one before."""
        ...

    async def sign_of_life(self) -> str:
        """The newest sign that was kept; empty where there is none."""
        ...


class LocalTermStore:
    """A `TermStore` for controllers of one process, one after the other or side by side."""

    def __init__(self) -> None:
        self._newest, self._sign = 0, ""

    async def claim(self, above: int) -> int:
        """The next number."""
        self._newest = max(self._newest, above) + 1
        return self._newest

    async def newest(self) -> int:
        """The highest number so far."""
        return self._newest

    async def live(self, sign: str) -> None:
        """Keeps the sign."""
        self._sign = sign

    async def sign_of_life(self) -> str:
        """The newest sign."""
        return self._sign


class Term:
    """One controller's term, and the highest that it has heard of. Its port sends `number` with every call."""

    def __init__(self, store: TermStore) -> None:
        self._store = store
        self.number = 0  # 0: none is taken yet
        self.newest = 0
        self._num_signs = 0

    @property
    def is_over(self) -> bool:
        """Whether a newer controller has taken over."""
        return 0 < self.number < self.newest

    async def take(self, above: int = 0) -> None:
        """Becomes the newest controller: above `above`, and above all that it has heard of."""
        self.number = await self._store.claim(max(above, self.newest))
        self.newest = max(self.newest, self.number)

    async def face(self, reported: int) -> None:
        """An instance has heard of term `reported`. Where the store has lost that one, takes a higher one."""
        if reported > self.number and await self._store.newest() < reported:
            await self.take(above=reported)
        self.hear(reported)

    async def look(self) -> None:
        """Asks the store which term is the newest."""
        self.hear(await self._store.newest())

    async def show_life(self) -> None:
        """Shows in the store that this controller acts."""
        self._num_signs += 1
        await self._store.live(f"{self.number}.{self._num_signs}")

    def hear(self, number: int) -> None:
        """A controller of that term has called an instance, or has been seen in the store."""
        self.newest = max(self.newest, number)
