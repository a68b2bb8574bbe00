"""Answers, is told what is wrong, and answers again.

The author is one conversation (``author``); a critic, where there is one, is another (``critic``).
"""

from typing import Annotated, Literal

from pydantic import Field

from schemas.records import Episode, Task, Trajectory
from stages.rollouts.patterns.base import Pattern, PatternConfig, placeholders, text_of
from stages.rollouts.sdk import AgentConfig, rollout


class RefineConfig(PatternConfig):
    """Settings of ``refine``."""

    rounds: int = Field(default=3, ge=1, le=64)
    """Answers of the author at most."""
    feedback: Literal["critic", "check", "fixed"] = "critic"
    """critic: the policy itself, in the role ``critic``, comments each answer. check: the author is told that its
    answer is wrong, where it is not the task's reference answer letter for letter; needs tasks with answers. fixed: the
    author is asked to think again, always with the same words."""
    critic_prompt: Annotated[str, placeholders("instruction", "answer")] = (
        "{instruction}\n\nThis answer was given:\n\n{answer}\n\nSay what is wrong with it. Say only OK if nothing is."
    )
    """What the critic is asked; one conversation over all rounds."""
    accept: str = Field(default="OK", min_length=1)
    """A comment that begins with this word ends the rounds."""
    revise_prompt: Annotated[str, placeholders("feedback")] = "{feedback}\n\nAnswer again."
    """What the author is told after ``critic`` has spoken."""
    wrong_prompt: str = "That is wrong. Answer again."
    """What the author is told by ``check``."""
    fixed_prompt: str = "Check your answer, and answer again."
    """What the author is told by ``fixed``."""


@rollout(name="author")
async def refine(task: Task, config: AgentConfig) -> Episode:
    """Artifacts: ``answers`` by trajectory, which is the last answer for both roles, and ``drafts``. The author has the
    signal ``rounds``."""
    settings = RefineConfig.model_validate(config.metadata)
    if settings.feedback == "check" and task.answer is None:
        raise ValueError(f"task {task.id!r} has no reference answer, which feedback: check compares with")
    critic = config.for_role("critic")
    messages = settings.opening(task.instruction)
    criticism = settings.opening("")[:-1]
    drafts: list[str] = []
    while True:
        reply = await config.chat(messages)
        drafts.append(reply.text.strip())
        if len(drafts) == settings.rounds:
            break
        if settings.feedback == "check":
            if drafts[-1] == (task.answer or "").strip():
                break
            feedback = settings.wrong_prompt
        elif settings.feedback == "fixed":
            feedback = settings.fixed_prompt
        else:
            asked = settings.critic_prompt.format(instruction=text_of(task.instruction), answer=drafts[-1])
            criticism.append({"role": "user", "content": asked})
            comment = await critic.chat(criticism)
            criticism.append(comment.message)
            if _accepts(comment.text, settings.accept):
                break
            feedback = settings.revise_prompt.format(feedback=comment.text)
        messages = [*messages, reply.message, {"role": "user", "content": feedback}]
    names = [config.role, critic.role] if settings.feedback == "critic" else [config.role]
    return Episode(
        trajectories=[Trajectory(name=config.role, signals={"rounds": float(len(drafts))})],
        artifacts={"answers": dict.fromkeys(names, drafts[-1]), "drafts": drafts},
    )


def _accepts(comment: str, word: str) -> bool:
    said = comment.strip().lower()
    rest = said.removeprefix(word.lower())
    return rest != said and not rest[:1].isalnum()


PATTERN = Pattern(refine, RefineConfig)
