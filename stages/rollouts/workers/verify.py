"""Makes a server prove that it has a policy's weights: by the probe, read as a prompt and sampled token by token."""

import asyncio
import secrets
from typing import Any

import numpy as np

from schemas.errors import StageFailed
from stages.rollouts.engines.base import PolicyFiles, probe_error, refuse_probe
from stages.rollouts.workers.answers import forced_logprob, prompt_logprobs
from stages.rollouts.workers.server import Server

_SAMPLED = 4
"""Tokens at the end of each probe sequence that are also sampled."""


async def verify(server: Server, model: str, policy: PolicyFiles, tolerance: float) -> None:
    """Returns if the server reproduces the policy's probe.

    Raises:
        StageFailed: it does not, by how much.
        ServerFault, UnusableAnswer: it could not be asked.
    """
    common = {
        "model": model,
        "max_tokens": 1,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "cache_salt": secrets.token_hex(16),  # nothing computed before counts
    }
    read = [await _read(server, common, ids) for ids in policy.probe.ids]
    refuse_probe(f"vllm at {server.place}", policy, probe_error(read, policy.probe), tolerance)
    sampled = await asyncio.gather(*[_sampled(server, common, ids) for ids in policy.probe.ids])
    pairs = zip(sampled, policy.probe.logprobs, strict=True)
    error = max(float(np.abs(found - wanted[len(wanted) - len(found) :]).max()) for found, wanted in pairs)
    if not error <= tolerance:
        raise StageFailed(
            f"engine vllm at {server.place} reads the probe of policy {policy.policy_id[:12]} right, and the logprobs "
            f"that it gives for sampled tokens are off by up to {error:.3g}; {tolerance:.3g} is tolerated",
            hint="it may give those after temperature and top-k: it must run with --logprobs-mode raw_logprobs",
        )


async def _read(server: Server, common: dict[str, Any], ids: np.ndarray) -> np.ndarray:
    body = common | {"prompt": ids.tolist(), "temperature": 0, "prompt_logprobs": 0}
    return prompt_logprobs(await server.complete(body), ids)


async def _sampled(server: Server, common: dict[str, Any], ids: np.ndarray) -> np.ndarray:
    """Of the last few ids, each the only one that may be sampled; the temperature must not show."""
    found = []
    for place in range(max(1, len(ids) - _SAMPLED), len(ids)):
        token = int(ids[place])
        body = common | {"prompt": ids[:place].tolist(), "temperature": 0.5, "allowed_token_ids": [token]}
        found.append(forced_logprob(await server.complete(body), token))
    return np.array(found, dtype=np.float32)
