"""Agents to copy: the patterns of the built-in agents, each as short as it can be, with nothing but ``rollmill``.

rollmill stage rollouts tasks=REF policy=REF agent=configs/examples/agents.py:refine
"""

import asyncio
import random
import re

import rollmill


@rollmill.rollout(name="author")
async def refine(task, config):
    """Answers, reads what a critic says, and answers again."""
    critic = config.for_role("critic")
    messages = [{"role": "user", "content": task.instruction}]
    draft = await config.chat(messages)
    comment = await critic.chat([{"role": "user", "content": f"{task.instruction}\n{draft.text}\nWhat is wrong?"}])
    final = await config.chat([*messages, draft.message, {"role": "user", "content": comment.text}])
    return {"answers": {"author": final.text, "critic": final.text}}


@rollmill.rollout(name="judge")
async def solver_judge(task, config):
    """Two solvers side by side; a judge names one. Grade it with ``params={of: answers}``."""
    question = [{"role": "user", "content": task.instruction}]
    solvers = ["solver-0", "solver-1"]
    texts = [reply.text for reply in await asyncio.gather(*(config.for_role(name).chat(question) for name in solvers))]
    shown = f"{task.instruction}\n0: {texts[0]}\n1: {texts[1]}\nWhich one is right?"
    ruling = await config.chat([{"role": "user", "content": shown}])
    choice = texts[int(ruling.text)] if ruling.text in ("0", "1") else None
    return {"answers": {"solver-0": texts[0], "solver-1": texts[1], "judge": choice}}


@rollmill.rollout
async def debate(task, config):
    """Two sides; each speaks twice, the second time with the other's words before it."""
    sides = [config.for_role("side-0"), config.for_role("side-1")]
    question = {"role": "user", "content": task.instruction}
    first = await asyncio.gather(*(side.chat([question]) for side in sides))
    heard = [[question, mine.message, {"role": "user", "content": other.text}] for mine, other in (first, first[::-1])]
    last = await asyncio.gather(*(side.chat(talk) for side, talk in zip(sides, heard, strict=True)))
    return {"answers": {"side-0": last[0].text, "side-1": last[1].text}}


@rollmill.rollout
async def react(task, config):
    """Adds numbers by a tool: the policy writes ``ADD 2 3`` and is told 5, until it writes something else."""
    messages = [{"role": "user", "content": task.instruction}]
    for _ in range(5):
        reply = await config.chat(messages)
        asked = re.fullmatch(r"ADD (\d+) (\d+)", reply.text.strip())
        if asked is None:
            return reply.text
        total = str(int(asked[1]) + int(asked[2]))
        messages = [*messages, reply.message, {"role": "user", "content": total}]
    return None


@rollmill.rollout
async def guess_the_number(task, config):
    """A game that pays its own reward: grade it with ``rewards.grader=agent``. The number is the task's, so that all
    attempts at a task look for the same one."""
    number, reward = random.Random(task.id).randrange(10), 0.0
    messages = [{"role": "user", "content": "Guess a number from 0 to 9."}]
    for turn in range(4):
        reply = await config.chat(messages)
        guess = int(reply.text) if reply.text.strip() in list("0123456789") else None
        if guess == number:
            reward = 1.0 - 0.1 * turn
            break
        told = "That is no number." if guess is None else "higher" if guess < number else "lower"
        messages = [*messages, reply.message, {"role": "user", "content": told}]
    return rollmill.Trajectory(name=config.role, reward=reward)
