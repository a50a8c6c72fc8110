"""A test's cluster of member processes."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any


class Process:
    """One member; `ask` posts a command, `answer` waits for its result."""

    def __init__(self, slot: int, incarnation: int = 0, timeout_s: float = 3.0, backend: str = "direct") -> None:
        self.life = [slot, incarnation]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.replicas.comm.member", str(slot), str(incarnation), str(timeout_s), backend],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def ask(self, name: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"member {self.life} died"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


class Cluster:
    """Members that know each other."""

    def __init__(self, num_members: int, timeout_s: float = 3.0, backend: str = "direct") -> None:
        self.timeout_s, self.backend = timeout_s, backend
        self.members = [Process(slot, 0, timeout_s, backend) for slot in range(num_members)]
        self.connect()

    def connect(self) -> None:
        addresses = [(*m.life, e["result"]) for m, e in zip(self.members, self.all("endpoint"), strict=True)]
        answers = self.all("connect", addresses)
        assert all(len(answer["result"]) == len(self.members) - 1 for answer in answers), answers

    def replace(self, slot: int) -> None:
        """A new life for a slot, known to all."""
        self.members[slot].stop()
        self.members[slot] = Process(slot, self.members[slot].life[1] + 1, self.timeout_s, self.backend)
        self.connect()

    def all(self, name: str, *arguments: Any, among: Iterable[int] | None = None) -> list[dict[str, Any]]:
        """One command to all members, at the same time; their answers."""
        members = self.members if among is None else [self.members[i] for i in among]
        for member in members:
            member.ask(name, *arguments)
        return [member.answer() for member in members]

    def lives(self, *slots: int) -> list[list[int]]:
        return [self.members[slot].life for slot in slots]

    def stop(self) -> None:
        for member in self.members:
            member.stop()
