"""What a session's own work costs a turn, without HTTP and without sampling: reading the messages, finding what they go
on from, rendering and encoding what is new, recording, and taking the answer apart.

Each turn's time is the shortest of several sessions, as whatever else the machine does only ever adds to it. The
collector of garbage is off: when it runs depends on all else that the process holds.
"""

import asyncio
import gc
import json
import time
from pathlib import Path

import numpy as np

from stages.rollouts.calls import ModelCall
from stages.rollouts.chat_template import chat_template_in
from stages.rollouts.engines.base import PolicyFiles, Probe, SamplingParams
from stages.rollouts.engines.scripted import ScriptedEngine
from stages.rollouts.session import Session

POLICY_ID = "0" * 64


def us_per_turn(folder: Path, ids: list[int], system: str, question: str, n_turns: int, n_sessions: int) -> float:
    """Microseconds of a turn, on average over the session's.

    Args:
        folder: the policy's.
        ids: every answer.
    """
    template, engine = chat_template_in(folder), ScriptedEngine(lambda request, vocabulary: ids)
    engine.load(PolicyFiles(POLICY_ID, folder, Probe([], [])))
    sampling = SamplingParams(max_tokens=len(ids), stop_token_ids=template.stop_token_ids)

    async def talk() -> list[float]:
        session = Session(
            "agent", template=template, engine=engine, policy_id=POLICY_ID, sampling=sampling, max_turns=None, seed=0,
            uid="episode",
        )  # fmt: skip
        messages, seconds = [{"role": "system", "content": system}], []
        for n in range(n_turns):
            messages.append({"role": "user", "content": question.format(n=n)})
            call = ModelCall(json.loads(json.dumps(messages)))  # as they come over HTTP: none is the same object again
            began = time.perf_counter()
            answer = await session.call(call)
            seconds.append(time.perf_counter() - began)
            messages.append(answer.message)
        if not all(step.prefix_length for step in session.steps()[1:]):
            raise AssertionError("a turn does not go on from the one before")
        return seconds

    gc.collect()
    gc.disable()
    try:
        return 1e6 * float(np.min([asyncio.run(talk()) for _ in range(n_sessions)], axis=0).mean())
    finally:
        gc.enable()
