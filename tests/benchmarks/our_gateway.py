"""Rollmill's gateway in a process of its own, as the rollouts stage runs it: every session is an episode whose calls
are journalled and recorded.

Its argument is JSON: the ``policy``'s folder, its probe (``ids`` and ``logprobs``), the ``sessions`` to hold open at
once, ``max_tokens`` of an answer, and the settings of the engine ``vllm``. It writes a line with the sessions'
addresses and the place of the first worker, and ends the episodes at the end of its input; then it writes how many
``calls`` were recorded.
"""

import asyncio
import json
import sys
from pathlib import Path

import numpy as np

from schemas.records import Task
from stages.rollouts.config import RolloutsConfig, RolloutsExecution, Sampling
from stages.rollouts.engines import close_engines, engine_for
from stages.rollouts.engines.base import PolicyFiles, Probe
from stages.rollouts.engines.vllm import VllmEngine
from stages.rollouts.episodes import Attempt, EpisodeRecord, Setting, run_attempts
from stages.rollouts.sdk import Agent, AgentConfig
from stages.rollouts.sources import policy_source
from stages.rollouts.workers.settings import VllmConfig, VllmExecution


def main() -> None:
    """Serves."""
    asked = json.loads(sys.argv[1])
    probe = Probe(
        [np.array(ids, dtype=np.int32) for ids in asked["ids"]],
        [np.array(logprobs, dtype=np.float32) for logprobs in asked["logprobs"]],
    )
    policy = PolicyFiles("0" * 64, Path(asked["policy"]), probe)
    open_sessions: list[AgentConfig] = []
    over = asyncio.Event()

    async def hold(task: Task, config: AgentConfig) -> None:
        open_sessions.append(config)
        if len(open_sessions) == asked["sessions"]:
            addresses = [{"url": one.base_url, "key": one.api_key} for one in open_sessions]
            engine = engine_for(settings.engine, execution)
            assert isinstance(engine, VllmEngine)
            told = {"sessions": addresses, "model": config.model, "worker": engine.workers[0].server.place}
            print(json.dumps(told), flush=True)
            await asyncio.to_thread(sys.stdin.read)
            over.set()
        await over.wait()

    attempts = [
        Attempt(f"{n:032x}", Task(id=f"t{n}", instruction=""), 0, n, "hold", Agent(hold))
        for n in range(asked["sessions"])
    ]
    episodes: list[EpisodeRecord] = []
    settings = RolloutsConfig(engine=VllmConfig(type="vllm"), sampling=Sampling(max_tokens=asked["max_tokens"]))
    execution = RolloutsExecution(vllm=VllmExecution(**asked["vllm"]))
    with policy_source(policy, settings, execution, "0" * 64, "benchmark") as source:
        setting = Setting(source, sampling={}, agent_config={}, time_limit_s=None, is_validation=False)
        run_attempts(attempts, setting, asked["sessions"], episodes.append)
    close_engines()
    print(json.dumps({"calls": sum(len(episode.steps) for episode in episodes)}), flush=True)


if __name__ == "__main__":
    main()
