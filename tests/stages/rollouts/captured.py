"""A gateway alone in this process, with one session: what a program gets there, and what is captured of it."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stages.rollouts.capture.config import GatewayConfig
from stages.rollouts.capture.log import Captured, End, Head, read_session
from stages.rollouts.capture.sessions import CapturedEngine, CapturedSession, Service
from stages.rollouts.chat_template import chat_template_in
from stages.rollouts.engines.base import Engine, PolicyFiles, SamplingParams
from stages.rollouts.gateway.server import Gateway
from stages.rollouts.masking import Masker

MODEL = "tiny"
HEAD = Head("s", "e", "default", 7, datetime(2026, 1, 1, tzinfo=UTC))


def captured(
    engine: Engine, policy: PolicyFiles, path: Path, program: Callable[[str, str], Any], max_tokens: int
) -> tuple[Any, Captured]:
    """What the program returns and what is captured of it.

    Args:
        engine: holds the policy.
        program: given a base URL and a key, in a thread.
    """
    template = chat_template_in(policy.folder)
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=template.stop_token_ids)
    service = Service(CapturedEngine(engine, policy), template, sampling, GatewayConfig(), Masker())

    async def run() -> Any:
        session = CapturedSession.begun(HEAD, path, service)
        async with service.engine.at_home(), Gateway(MODEL, lambda role: template.token_text) as gateway:
            endpoint = gateway.open("s", session, HEAD.role)
            told = await asyncio.to_thread(program, endpoint.base_url(HEAD.role), endpoint.api_key)
            gateway.close("s")
            session.end(End(datetime.now(UTC)))
        return told

    told = asyncio.run(run())
    found = read_session(path)
    assert found is not None
    return told, found
