"""Where the answers of a shard's episodes come from: a policy in an engine, or a model that others serve."""

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from schemas.canonical import canonical_hash
from schemas.errors import StageFailed
from stages.rollouts.calls import ModelAnswer, ModelCall
from stages.rollouts.chat_template import ChatTemplate, chat_template_in
from stages.rollouts.config import RolloutsConfig, RolloutsExecution, Sampling
from stages.rollouts.endpoints.client import opened
from stages.rollouts.endpoints.journal import JournalEndpoint
from stages.rollouts.endpoints.session import EndpointSession, TextStep
from stages.rollouts.endpoints.settings import EndpointConfig
from stages.rollouts.engines import engine_for
from stages.rollouts.engines.base import PolicyFiles, SamplingParams
from stages.rollouts.engines.progress import Progress
from stages.rollouts.journal import journal_files, journalled
from stages.rollouts.masking import Masker
from stages.rollouts.role_policies import served_by
from stages.rollouts.sdk import Messages, Reply
from stages.rollouts.session import RecordedStep, Session
from stages.rollouts.telling import Teller

AnyStep = RecordedStep | TextStep


class TrajectorySession(Protocol):
    """The model calls of one trajectory."""

    async def chat(self, messages: Messages, progress: Progress | None = None) -> Reply: ...

    async def call(
        self, call: ModelCall, teller: Teller | None = None, progress: Progress | None = None
    ) -> ModelAnswer:
        """
        Args:
            teller: tells the answer while it is sampled, where that can be known; then its own progress counts.
            progress: where what is asked and sampled can be seen, whatever becomes of the call.
        """

    def steps(self) -> list[Any]:
        """Of one of the types in ``AnyStep``."""


@dataclass(frozen=True)
class Source:
    """What answers."""

    model: str
    """What agents call it."""
    token_text: Callable[[str], Callable[[int], str]]
    """Given the trajectory: how a token id is written there."""
    new_session: Callable[..., TrajectorySession]
    """Given the trajectory, and by name the ``seed`` and the ``uid`` of its episode."""
    mask: Callable[[str], str]
    """What takes secrets out of what agents return and raise."""
    logprob_mode: str | None
    """None: there are no logprobs."""
    facts: Callable[[], dict[str, list[str]]]
    """What belongs into the artifact's summary."""
    at_home: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
    """Entered in the episodes' event loop, for as long as they run."""


def sampling_params(template: ChatTemplate, sampling: Sampling) -> SamplingParams:
    """How an engine is to sample; the ends that the policy itself knows are ends."""
    stops = tuple(sorted({*template.stop_token_ids, *map(template.token_id, sampling.stop)}))
    return SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens, stops)


@contextmanager
def policy_source(
    policy: PolicyFiles, config: RolloutsConfig, execution: RolloutsExecution, key: str, shard: str, role: str = ""
) -> Iterator[Source]:
    """A policy in an engine, for one shard of the work called ``key``.

    Args:
        role: name in ``config.roles`` of one that is not the stage's own.
    """
    template = chat_template_in(policy.folder)
    engine = engine_for(config.engine, execution, role)
    with engine.serving(policy), journalled(engine, key, shard) as journal:
        yield Source(
            model=policy.policy_id[:12],
            token_text=lambda trajectory: template.token_text,
            new_session=partial(
                Session,
                template=template,
                engine=journal,
                policy_id=policy.policy_id,
                sampling=sampling_params(template, config.sampling),
                max_turns=config.max_turns,
                agent_samples=config.agent_samples,
            ),
            mask=Masker(),
            logprob_mode=engine.logprob_mode,
            facts=engine.facts,
            at_home=journal.at_home,
        )


@contextmanager
def role_source(
    policy: PolicyFiles,
    of_roles: Mapping[str, PolicyFiles],
    config: RolloutsConfig,
    execution: RolloutsExecution,
    key: str,
    shard: str,
) -> Iterator[Source]:
    """A policy, and others that answer for some roles.

    Args:
        of_roles: by name in ``config.roles``.
    """
    with ExitStack() as stack:
        own = stack.enter_context(policy_source(policy, config, execution, key, shard))
        sources = {}
        for name, files in sorted(of_roles.items()):  # always in this order, so that no two shards wait for each other
            role = config.roles[name]
            settings = config.model_copy(
                update={"engine": role.engine or config.engine, "sampling": role.sampling or config.sampling}
            )
            journal = canonical_hash([key, name])  # the same question to another policy is another one
            sources[name] = stack.enter_context(
                policy_source(files, settings, execution.of_role(name), journal, shard, name)
            )
        yield _together(own, sources)


def _together(own: Source, of_roles: Mapping[str, Source]) -> Source:
    """One source in which some roles are answered by others than its own."""
    everyone = [own, *of_roles.values()]
    modes = {source.logprob_mode for source in everyone}
    if len(modes) > 1:
        raise StageFailed(f"the engines of the roles have logprobs of different kinds: {', '.join(map(str, modes))}")

    def new_session(trajectory: str, **told: Any) -> TrajectorySession:
        return served_by(trajectory, of_roles, own).new_session(trajectory, **told)

    def facts() -> dict[str, list[str]]:
        found: dict[str, set[str]] = {}
        for name, values in (item for source in everyone for item in source.facts().items()):
            found.setdefault(name, set()).update(values)
        return {name: sorted(values) for name, values in found.items()}

    @asynccontextmanager
    async def at_home() -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for source in everyone:
                await stack.enter_async_context(source.at_home())
            yield

    return replace(
        own,
        token_text=lambda trajectory: served_by(trajectory, of_roles, own).token_text(trajectory),
        new_session=new_session,
        facts=facts,
        at_home=at_home,
    )


@contextmanager
def endpoint_source(
    engine: EndpointConfig, config: RolloutsConfig, execution: RolloutsExecution, key: str, shard: str
) -> Iterator[Source]:
    """A model that others serve, for one shard of the work called ``key``.

    Raises:
        EngineFault: it has refused every call.
    """
    sampling = config.sampling
    with opened(engine, execution.endpoint) as endpoint, journal_files(key, shard) as (old, file):
        yield Source(
            model=engine.model,
            token_text=lambda trajectory: str,
            new_session=partial(
                EndpointSession,
                ask=JournalEndpoint(endpoint, old, file).ask,
                config=engine,
                sampling=SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens),
                max_turns=config.max_turns,
                agent_samples=config.agent_samples,
                stop=tuple(sampling.stop),
            ),
            mask=endpoint.mask,
            logprob_mode=None,
            facts=lambda: {"models": [engine.model]},
        )
        endpoint.check_it_answers()
