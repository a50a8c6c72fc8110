"""Sends a workload to any server with OpenAI's completions, each request at its own time; writes what came of it.

Prompts are token ids made from the trace's hash ids: equal ids give equal tokens, so that prefixes are shared as they
are in the trace. Priorities go as vLLM's extension `priority`, tenants and sessions as headers, changes of a session's
priority by `PUT /cluster/sessions/{id}/priority`; each can be left out for servers that know it not.
"""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.fair.workload import Turn, Update, Workload

FIRST_TOKEN_ID = 3
ANSWER_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where and how requests are sent."""

    url: str
    model: str
    vocabulary: int  # token ids below this are plain
    block_tokens: int
    has_priorities: bool = True
    has_tenants: bool = True
    has_updates: bool = True
    headers: dict[str, str] = field(default_factory=dict)


def prompt(turn: Turn, target: Target) -> list[int]:
    """Token ids of a turn's prompt."""
    ids: list[int] = []
    for block in turn.hash_ids:
        source = random.Random(block)
        ids += [source.randrange(FIRST_TOKEN_ID, target.vocabulary) for _ in range(target.block_tokens)]
    return ids[: turn.input_length]


async def play(workload: Workload, target: Target) -> list[dict[str, Any]]:
    """One outcome for each request, in the workload's order; times are seconds after the start."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx.AsyncClient(
        base_url=target.url, timeout=ANSWER_TIMEOUT_S, limits=limits, trust_env=False, headers=target.headers
    ) as http:
        start_s = time.perf_counter()
        changes = asyncio.create_task(_change(http, workload.updates, start_s)) if target.has_updates else None
        jobs = [asyncio.create_task(_ask(http, turn, target, start_s)) for turn in workload.turns]
        outcomes = await asyncio.gather(*jobs)
        if changes is not None:
            changes.cancel()
            await asyncio.gather(changes, return_exceptions=True)
        return outcomes


async def _ask(http: httpx.AsyncClient, turn: Turn, target: Target, start_s: float) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": target.model,
        "prompt": prompt(turn, target),
        "max_tokens": turn.output_length,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    if target.has_priorities and turn.priority:
        body["priority"] = turn.priority
    headers = {"x-session-id": turn.session, "x-request-id": f"{turn.session}.{turn.turn}"}
    if target.has_tenants:
        headers["x-pengserve-tenant"] = turn.tenant
    await asyncio.sleep(max(0.0, start_s + turn.at_s - time.perf_counter()))
    sent_s, times, error = time.perf_counter() - start_s, [], ""
    try:
        async with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                error = f"{answer.status_code} {(await answer.aread())[:200].decode(errors='replace')}"
            else:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        times.append(round(time.perf_counter() - start_s, 5))
                        if '"error"' in line[:20]:
                            error = line[:200]
    except httpx.HTTPError as fault:
        error = f"{type(fault).__name__}: {fault}"
    return {"tenant": turn.tenant, "priority": turn.priority, "sent_s": sent_s, "token_s": times, "error": error}


async def _change(http: httpx.AsyncClient, updates: Sequence[Update], start_s: float) -> None:
    for update in updates:
        await asyncio.sleep(max(0.0, start_s + update.at_s - time.perf_counter()))
        with contextlib.suppress(httpx.HTTPError):  # 404 where nothing of the session is in flight
            path = f"/cluster/sessions/{update.session}/priority"
            await http.put(path, json={"priority": update.priority})


def write_outcomes(path: Path, outcomes: Sequence[dict[str, Any]]) -> None:
    """One line each."""
    path.write_text("".join(json.dumps(outcome) + "\n" for outcome in outcomes))
