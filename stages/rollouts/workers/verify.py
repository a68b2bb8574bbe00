"""Makes a server prove that it has a policy's weights: by the probe, read as a prompt and sampled token by token."""

import asyncio
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.errors import StageFailed
from stages.rollouts.engines.base import PolicyFiles, probe_error, refuse_probe
from stages.rollouts.workers.answers import forced_logprob, prompt_logprobs
from stages.rollouts.workers.dialects import DIALECTS, Dialect, Told, UnusableAnswer
from stages.rollouts.workers.server import Server, ServerFault

_SAMPLED = 4
"""Tokens at the end of each probe sequence that are also sampled."""


async def dialect_of(server: Server, model: str, token: int) -> Dialect:
    """The first dialect in which the server gives a logprob for one sampled token, the one that is allowed.

    Raises:
        ServerFault, UnusableAnswer: it does so in none.
    """
    *better, last = DIALECTS
    for dialect in better:
        try:
            await _forced(Probing(server, dialect, model), [token], token)
        except (ServerFault, UnusableAnswer):
            continue
        return dialect
    await _forced(Probing(server, last, model), [token], token)
    return last


@dataclass(frozen=True)
class Probing:
    """Whom to ask, in which dialect, and for which model."""

    server: Server
    dialect: Dialect
    model: str

    async def ask(self, prompt: list[int], **sampling: Any) -> Told:
        salt = secrets.token_hex(16)  # nothing computed before counts
        body = self.dialect.body(prompt, {"max_tokens": 1, "ignore_eos": True, "logprobs": 0} | sampling)
        asked = body | {"model": self.model, "cache_salt": salt}
        return self.dialect.read(await self.server.complete(self.dialect.path, asked))


async def verify(probing: Probing, policy: PolicyFiles, tolerance: float) -> None:
    """Returns if the server reproduces the policy's probe.

    Raises:
        StageFailed: it does not, by how much.
        ServerFault, UnusableAnswer: it could not be asked.
    """
    place = probing.server.place
    read = [await _read(probing, ids) for ids in policy.probe.ids]
    refuse_probe(f"vllm at {place}", policy, probe_error(read, policy.probe), tolerance)
    sampled = await asyncio.gather(*[_sampled(probing, ids) for ids in policy.probe.ids])
    pairs = zip(sampled, policy.probe.logprobs, strict=True)
    error = max(float(np.abs(found - wanted[len(wanted) - len(found) :]).max()) for found, wanted in pairs)
    if not error <= tolerance:
        raise StageFailed(
            f"engine vllm at {place} reads the probe of policy {policy.policy_id[:12]} right, and the logprobs "
            f"that it gives for sampled tokens are off by up to {error:.3g}; {tolerance:.3g} is tolerated",
            hint="it may give those after temperature and top-k: it must run with --logprobs-mode raw_logprobs",
        )


async def _read(probing: Probing, ids: np.ndarray) -> np.ndarray:
    return prompt_logprobs(await probing.ask(ids.tolist(), temperature=0, prompt_logprobs=0), ids)


async def _sampled(probing: Probing, ids: np.ndarray) -> np.ndarray:
    """Of the last few ids, each the only one that may be sampled."""
    places = range(max(1, len(ids) - _SAMPLED), len(ids))
    return np.array([await _forced(probing, ids[:place].tolist(), int(ids[place])) for place in places], np.float32)


async def _forced(probing: Probing, prompt: list[int], token: int) -> float:
    """The logprob of a token that is the only one that may be sampled; the temperature must not show."""
    return forced_logprob(await probing.ask(prompt, temperature=0.5, allowed_token_ids=[token]), token)
