"""The Arrow schema of every table, one declared schema a table, with a line on each column.

The line (units, and what null means) travels in the field's metadata under ``doc``, so that
``rollmill show`` and anyone who opens a file can read it. Raise ``version`` by hand when a table changes.
Lists are ``large_list`` (no 2^31 offset overflow) with non-null items named ``element``.
"""

from dataclasses import dataclass

import pyarrow as pa

TIMESTAMP = pa.timestamp("us", tz="UTC")
TOKEN_IDS = pa.large_list(pa.field("element", pa.int32(), nullable=False))
FLOATS = pa.large_list(pa.field("element", pa.float32(), nullable=False))


@dataclass(frozen=True)
class TableSpec:
    """One table of the store: its name, version, Arrow schema and the columns that identify a row."""

    name: str
    version: int
    id_columns: tuple[str, ...]
    """Unique together; files are sorted by them, and joins use them."""
    schema: pa.Schema


def _column(name: str, type_: pa.DataType, doc: str, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, type_, nullable=nullable, metadata={"doc": doc})


def _optional(name: str, type_: pa.DataType, doc: str) -> pa.Field:
    return _column(name, type_, doc, nullable=True)


TASKS = TableSpec(
    "tasks",
    1,
    ("task_id",),
    pa.schema(
        [
            _column("task_id", pa.string(), "stable id, given by the source or a hash of the content; opaque"),
            _column("instruction", pa.string(), "what the agent is asked: text, or a JSON list of content parts"),
            _optional("answer", pa.string(), "the reference answer; null: the task has none"),
            _optional("metadata", pa.string(), "canonical JSON of the source's other columns; null: none"),
            _optional("benchmark", pa.string(), "name of the benchmark; null: not from a benchmark"),
            _optional("split", pa.string(), "split of the source (train, test, …); null: the source has none"),
            _optional("grader", pa.string(), "grader that the task asks for; null: the rewards stage decides"),
            _optional("agent", pa.string(), "agent that the task asks for; null: the rollouts stage decides"),
        ]
    ),
)

EPISODES = TableSpec(
    "episodes",
    1,
    ("episode_id",),
    pa.schema(
        [
            _column("episode_id", pa.string(), "id of this attempt, unique in the store; opaque"),
            _column("task_id", pa.string(), "the task that was attempted"),
            _column("rollout_index", pa.int32(), "which attempt at the task, 0 to n-1"),
            _column("agent", pa.string(), "the agent that made the attempt"),
            _column("status", pa.string(), "completed, truncated, max_turns, timeout or error"),
            _optional("error_kind", pa.string(), "class of the fault; null unless status is error or timeout"),
            _optional("error", pa.string(), "message of the fault; null unless status is error or timeout"),
            _optional("artifacts", pa.string(), "canonical JSON of what the agent returned; null: nothing"),
            _column("seed", pa.int64(), "seed of the attempt, from which each step's seed derives"),
            _column("started_at", TIMESTAMP, "when the attempt began, UTC"),
            _column("duration_s", pa.float64(), "wall time of the attempt, seconds"),
            _column("n_steps", pa.int32(), "model calls in the attempt"),
            _optional("prompt_tokens", pa.int64(), "tokens of all calls' full prompts; null: the engine does not tell"),
            _optional("response_tokens", pa.int64(), "sampled tokens of all calls; null: the engine does not tell"),
        ]
    ),
)

STEPS = TableSpec(
    "steps",
    1,
    ("episode_id", "trajectory", "step_index"),
    pa.schema(
        [
            _column("episode_id", pa.string(), "the attempt that made this model call"),
            _column("trajectory", pa.string(), "name or role of the trajectory inside the episode"),
            _column("step_index", pa.int32(), "place of the call in its trajectory, 0 to n-1"),
            _column("finish_reason", pa.string(), "why sampling ended: stop, length, tool_calls or abort"),
            _optional("policy_id", pa.string(), "key of the policy that sampled; null: no policy of a store did"),
            _optional(
                "logprob_mode",
                pa.string(),
                "raw (the model's own), processed, constrained (by a schema); null: none",
            ),
            _optional("temperature", pa.float64(), "0 is greedy; null: the engine's default"),
            _optional("top_p", pa.float64(), "nucleus mass, 1 keeps all; null: the engine's default"),
            _optional("top_k", pa.int32(), "candidates kept; null: no limit"),
            _optional("seed", pa.int64(), "seed of this call; null: the engine was given none"),
            _column("started_at", TIMESTAMP, "when the call was sent, UTC"),
            _column("latency_s", pa.float64(), "from sending the call to its last token, seconds"),
            _optional("worker", pa.string(), "the engine worker that answered; null: not known"),
            _optional(
                "prefix_length", pa.int64(), "leading ids of the sequence so far that the prompt keeps; null: no ids"
            ),
            _column("messages", pa.large_string(), "canonical JSON of the messages new since the previous step"),
            _optional("response", pa.large_string(), "the decoded answer without its stop token; null: no text"),
            _optional("reasoning", pa.large_string(), "reasoning kept apart from the answer; null: none"),
            _optional("tool_calls", pa.large_string(), "canonical JSON of the tool calls; null: none"),
            _optional("prompt_ids", TOKEN_IDS, "ids after the first prefix_length; null: the endpoint gives none"),
            _optional("response_ids", TOKEN_IDS, "sampled ids, stop token included; null: the endpoint gives none"),
            _optional("logprobs", FLOATS, "natural-log probability of each sampled id; null: the endpoint gives none"),
        ]
    ),
)

CALL_ERRORS = TableSpec(
    "call_errors",
    2,
    ("episode_id", "trajectory", "error_index"),
    pa.schema(
        [
            _column("episode_id", pa.string(), "the attempt that made this model call"),
            _column("trajectory", pa.string(), "name or role of the trajectory inside the episode"),
            _column("error_index", pa.int32(), "place among the trajectory's failed calls, 0 to n-1"),
            _column("started_at", TIMESTAMP, "when the call was made, UTC"),
            _column("status", pa.string(), "refused, abandoned (nobody waited for it) or retried (a worker's fault)"),
            _column("kind", pa.string(), "class of the fault"),
            _optional("policy_id", pa.string(), "key of the policy that was asked; null: none was, or not known"),
            _column("message", pa.large_string(), "message of the fault"),
            _optional("prompt_ids", TOKEN_IDS, "ids of the full prompt; null: no policy was asked, or not known"),
            _optional(
                "response_ids",
                TOKEN_IDS,
                "ids sampled until the call ended, none: empty; null: not asked, or the engine does not tell before an "
                "answer is whole",
            ),
            _optional("logprobs", FLOATS, "natural-log probability of each of response_ids; null with them"),
        ]
    ),
)

REWARDS = TableSpec(
    "rewards",
    1,
    ("episode_id", "trajectory"),
    pa.schema(
        [
            _column("episode_id", pa.string(), "the attempt that was graded"),
            _column("trajectory", pa.string(), "the trajectory that was graded"),
            _column("status", pa.string(), "of the grading: ok, timeout, error or infra"),
            _optional("reward", pa.float64(), "the reward; null unless status is ok"),
            _optional("is_correct", pa.bool_(), "whether the answer is right; null: the grader does not judge that"),
            _optional("verdict", pa.string(), "why: correct, wrong_answer, no_answer, truncated, …; null unless ok"),
            _optional("explanation", pa.string(), "the grader's reason or its fault's message; null: it gave none"),
            _column("grader", pa.string(), "name of the grader"),
            _column("grader_version", pa.string(), "version that its author gave, or a hash of its source"),
            _column("duration_s", pa.float64(), "wall time of the grading, seconds"),
        ]
    ),
)

SIGNALS = TableSpec(
    "signals",
    1,
    ("episode_id", "trajectory", "name"),
    pa.schema(
        [
            _column("episode_id", pa.string(), "the attempt that was graded"),
            _column("trajectory", pa.string(), "the trajectory that was graded"),
            _column("name", pa.string(), "name of the number"),
            _column("value", pa.float64(), "the number, in the grader's own unit"),
        ]
    ),
)

STEP_REWARDS = TableSpec(
    "step_rewards",
    1,
    ("episode_id", "trajectory", "step_index"),
    pa.schema(
        [
            _column("episode_id", pa.string(), "the attempt that was graded"),
            _column("trajectory", pa.string(), "the trajectory that was graded"),
            _column("step_index", pa.int32(), "the step that was graded"),
            _column("reward", pa.float64(), "the step's reward"),
        ]
    ),
)

ADVANTAGES = TableSpec(
    "advantages",
    1,
    ("episode_id", "trajectory"),
    pa.schema(
        [
            _column("episode_id", pa.string(), "the attempt"),
            _column("trajectory", pa.string(), "the trajectory"),
            _column("group_id", pa.string(), "id of the group (task_id, trajectory name); opaque"),
            _optional("advantage", pa.float64(), "one advantage for all sampled tokens; null: the reward is not known"),
            _optional("baseline", pa.float64(), "what was subtracted from the reward; null: nothing was"),
            _optional("group_mean", pa.float64(), "mean reward of the group; null: no reward in it is known"),
            _optional("group_std", pa.float64(), "standard deviation (n-1); null: fewer than two rewards are known"),
            _column("group_size", pa.int32(), "trajectories of the group whose reward is known"),
            _column("kept", pa.bool_(), "whether the policy stage trains on it"),
            _optional("drop_reason", pa.string(), "why not; null exactly when kept"),
            _optional("token_advantages", FLOATS, "one per sampled token; null unless the estimator works on tokens"),
        ]
    ),
)

METRICS = TableSpec(
    "metrics",
    1,
    ("stage", "name"),
    pa.schema(
        [
            _optional("run", pa.string(), "the run; null in a stage's own file: rollmill.scan fills it in"),
            _optional("iteration", pa.int32(), "the iteration; null in a stage's own file: rollmill.scan fills it in"),
            _column("stage", pa.string(), "the stage that measured"),
            _column("name", pa.string(), "name of the measurement, with its unit as suffix where it has one"),
            _optional("value", pa.float64(), "the number; null: it could not be measured"),
            _column("recorded_at", TIMESTAMP, "when it was recorded, UTC"),
        ]
    ),
)

PROBE = TableSpec(
    "probe",
    1,
    ("probe_id",),
    pa.schema(
        [
            _column("probe_id", pa.int32(), "number of the fixed sequence"),
            _column("ids", TOKEN_IDS, "the sequence"),
            _column(
                "logprobs",
                FLOATS,
                "the trainer's natural-log probability of ids[i+1] after ids[:i+1]",
            ),
        ]
    ),
)

TASK_SCORES = TableSpec(
    "task_scores",
    1,
    ("task_id", "trajectory"),
    pa.schema(
        [
            _column("task_id", pa.string(), "the task"),
            _column("trajectory", pa.string(), "the trajectory's name"),
            _column("n_attempts", pa.int32(), "trajectories sampled"),
            _column("n_scored", pa.int32(), "of them, those whose grading succeeded"),
            _optional("mean_reward", pa.float64(), "mean over the scored ones; null: none was scored"),
            _optional("pass_rate", pa.float64(), "share judged correct; null: none was judged"),
            _optional("best_reward", pa.float64(), "largest reward; null: none was scored"),
            _optional("mean_response_tokens", pa.float64(), "sampled tokens an attempt; null: not known"),
        ]
    ),
)

TABLES: dict[str, TableSpec] = {
    spec.name: spec
    for spec in (
        TASKS,
        EPISODES,
        STEPS,
        CALL_ERRORS,
        REWARDS,
        SIGNALS,
        STEP_REWARDS,
        ADVANTAGES,
        METRICS,
        PROBE,
        TASK_SCORES,
    )
}
