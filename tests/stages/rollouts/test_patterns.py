"""The built-in agents, through the stage: which trajectories, steps, answers and signals each leaves behind."""

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from schemas.errors import ConfigError
from stages.rollouts.patterns.environments import environment_named
from tests.builders import given, task_rows
from tests.stages.rollouts.policies import make_policy
from tests.stages.rollouts.stored import frame, request, rolled_out, stored_policy, stored_tasks


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """The tiny policy with room for long conversations."""
    return make_policy(tmp_path_factory.mktemp("roomy"), max_position_embeddings=4096)


@pytest.fixture
def play(memory_store, policy):
    """Runs an agent on six tasks with a policy that says one of these things each time, as the call's seed picks.

    Returns the episodes with their decoded artifacts, and the steps by episode and trajectory.
    """
    tokenizer = AutoTokenizer.from_pretrained(policy.folder)

    def run(agent: str, says: list[str], settings: dict[str, Any] | None = None, tasks: Any = None, **config: Any):
        replies = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in says]
        asked = {
            "agent": agent,
            "agent_config": settings or {},
            "n": 3,
            "engine": {"type": "scripted", "replies": replies},
            "sampling": {"max_tokens": 100},
        }
        tasks = tasks or stored_tasks(memory_store, 2)
        manifest = rolled_out(
            memory_store, request(tasks, stored_policy(memory_store, policy), asked | config)
        ).manifest
        episodes = frame(memory_store, manifest, "episodes").to_dicts()
        for episode in episodes:
            episode["artifacts"] = json.loads(episode["artifacts"] or "{}")
        steps: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for step in frame(memory_store, manifest, "steps").sort("step_index").to_dicts():
            step["messages"] = json.loads(step["messages"])
            steps.setdefault(step["episode_id"], {}).setdefault(step["trajectory"], []).append(step)
        assert len(episodes) == 6
        return [(episode, steps[episode["episode_id"]]) for episode in episodes]

    return run


def said(steps: list[dict[str, Any]]) -> list[str]:
    return [step["response"] for step in steps]


def asked(step: dict[str, Any]) -> str:
    return step["messages"][-1]["content"]


def test_solvers_do_not_see_each_other_and_the_judge_sees_them_in_order(play):
    seen = set()
    for episode, by_role in play(
        "solver_judge", ["1", "2", "3", "none"], {"solvers": 3, "candidate": "{number}={text}"}
    ):
        assert set(by_role) == {"solver-0", "solver-1", "solver-2", "judge"}
        assert {len(steps) for steps in by_role.values()} == {1}
        solved = [said(by_role[f"solver-{number}"])[0] for number in range(3)]
        for number in range(3):
            assert asked(by_role[f"solver-{number}"][0]).startswith("What is ")
        listed = "\n\n".join(f"{number}={text}" for number, text in enumerate(solved, start=1))
        assert listed in asked(by_role["judge"][0])
        ruling = said(by_role["judge"])[0]
        chosen = None if ruling == "none" else f"solver-{int(ruling) - 1}"
        seen.add(chosen)
        answers = episode["artifacts"]["answers"]
        assert episode["artifacts"]["chosen"] == chosen
        assert answers["judge"] == (answers[chosen] if chosen else None)
        assert [answers[f"solver-{number}"] for number in range(3)] == solved
        assert episode["status"] == "completed"
    assert len(seen) > 1


def test_a_judge_that_names_nobody_has_no_answer(play):
    for episode, _ in play("solver_judge", ["9"], {"solvers": 2}):
        assert episode["artifacts"] == {"answers": {"solver-0": "9", "solver-1": "9", "judge": None}, "chosen": None}


def test_sides_of_a_debate_hear_the_others_from_the_second_round_on(play):
    settings = {
        "sides": 3,
        "rounds": 2,
        "candidate": "{number}={text}",
        "separator": ";",
        "rebuttal_prompt": "<{others}>",
    }
    for episode, by_role in play("debate", ["1", "2", "3"], settings):
        sides = [by_role[f"side-{number}"] for number in range(3)]
        assert [len(side) for side in sides] == [2, 2, 2]
        assert len(by_role["judge"]) == 1
        first = [said(side)[0] for side in sides]
        for number, side in enumerate(sides):
            others = ";".join(f"{other + 1}={first[other]}" for other in range(3) if other != number)
            assert asked(side[1]) == f"<{others}>"
            assert side[1]["prefix_length"] > 0
        last = [said(side)[1] for side in sides]
        assert ";".join(f"{number}={text}" for number, text in enumerate(last, start=1)) in asked(by_role["judge"][0])
        side = episode["artifacts"]["chosen"]
        assert side == f"side-{int(said(by_role['judge'])[0]) - 1}"
        assert episode["artifacts"]["answers"]["judge"] == episode["artifacts"]["answers"][side]


def test_a_debate_without_a_judge_has_its_sides_alone_each_with_its_position(play):
    settings = {"positions": ["yes", "no"], "rounds": 1, "judge": False}
    for episode, by_role in play("debate", ["so"], settings):
        assert set(by_role) == set(episode["artifacts"]["answers"]) == {"side-0", "side-1"}
        assert asked(by_role["side-1"][0]).endswith("Your position: no")


def test_refinement_ends_with_the_critics_consent_or_the_last_round(play):
    ends = set()
    for episode, by_role in play("refine", ["OK.", "okay not", "7"], {"rounds": 3}):
        author, critic = said(by_role["author"]), said(by_role["critic"])
        accepted = critic[-1] == "OK."
        ends.add(accepted)
        assert "OK." not in critic[:-1]
        assert len(author) == (len(critic) if accepted else len(critic) + 1)
        assert accepted or len(author) == 3
        for draft, step in zip(author, by_role["critic"], strict=False):
            assert f"This answer was given:\n\n{draft.strip()}\n" in asked(step)
        for comment, step in zip(critic, by_role["author"][1:], strict=False):
            assert asked(step).startswith(comment)
        assert episode["artifacts"]["answers"] == {"author": author[-1], "critic": author[-1]}
        assert episode["artifacts"]["trajectories"]["author"]["signals"] == {"rounds": len(author)}
    assert ends == {True, False}


def test_refinement_by_check_ends_with_the_right_answer(play):
    for episode, by_role in play("refine", ["0", "2", "5"], {"rounds": 4, "feedback": "check"}):
        answer = {"t000": "0", "t001": "2"}[episode["task_id"]]
        drafts = said(by_role["author"])
        assert set(by_role) == {"author"}
        assert answer not in drafts[:-1]
        assert drafts[-1] == answer or len(drafts) == 4
        assert episode["artifacts"]["drafts"] == drafts


def test_react_uses_tools_until_it_answers(play):
    replies = ["Action: calculator\nInput: 2 * (3 + 4)", "Action: python\nInput: print(6 * 7)", "hm", "Answer: 14",
               "Action: shovel\nInput: x"]  # fmt: skip
    told = {
        replies[0]: "Observation: 14",
        replies[1]: "Observation: 42",
        replies[2]: "Observation: That is neither an Action with an Input nor an Answer.",
        replies[4]: "Observation: there is no tool 'shovel'; there are calculator, python",
    }
    for episode, by_role in play("react", replies, {"turns": 4}, sampling={"max_tokens": 100}):
        assert episode["status"] == "completed", episode["error"]
        steps = by_role["react"]
        assert "calculator: the value" in steps[0]["messages"][0]["content"]
        for before, step in zip(said(steps)[:-1], steps[1:], strict=True):
            assert asked(step) == told[before]
        answered = said(steps)[-1] == replies[3]
        assert answered or len(steps) == 4
        assert episode["artifacts"]["answers"] == {"react": "14" if answered else None}
        signals = episode["artifacts"]["trajectories"]["react"]["signals"]
        assert signals["turns"] == len(steps)
        assert signals["parse_errors"] == said(steps).count("hm")
        assert signals["tool_errors"] == said(steps).count(replies[4])


def game_tasks(store: Any, name: str, params: dict[str, Any] | None = None) -> Any:
    rows = task_rows(2)
    for seed, row in enumerate(rows):
        row["metadata"] = json.dumps({"environment": name, "params": params or {}, "seed": seed})
    return given(store, "tasks", {"tasks": rows})


@pytest.mark.parametrize(("name", "params"), [("frozen_lake", {"slippery": 0.3}), ("sokoban", {"box_reward": 0.5})])
@pytest.mark.parametrize("history", [None, 0, 1])
def test_a_game_can_be_played_again_from_its_stored_steps(memory_store, play, name, params, history):
    settings = {"turns": 6, "history": history, "rules": "", "show_instruction": False, "error_reward": -0.25}
    games = game_tasks(memory_store, name, params)
    some_errors = 0
    for episode, by_role in play("environment", ["go right", "Down!", "upright", "left"], settings, games):
        assert episode["status"] == "completed", episode["error"]
        game = environment_named(name, params)
        seen = game.reset(int(episode["task_id"][1:]))
        reward, errors, is_over = 0.0, 0, False
        for step in by_role["player"]:
            assert not is_over
            assert asked(step) == seen
            action = game.parse(step["response"])
            if action is None:
                errors += 1
                reward -= 0.25
                seen = "That is no action.\n" + seen.removeprefix("That is no action.\n")
                continue
            outcome = game.step(action)
            seen, is_over = outcome.observation, outcome.is_over
            reward += outcome.reward
        some_errors += errors
        played = episode["artifacts"]["trajectories"]["player"]
        assert played["reward"] == pytest.approx(reward)
        assert played["signals"]["parse_errors"] == errors == said(by_role["player"]).count("upright")
        assert played["signals"]["turns"] == len(by_role["player"])
        assert is_over or len(by_role["player"]) == 6
    assert some_errors


def test_the_policy_sees_as_many_past_turns_as_history_says(memory_store, play):
    games = game_tasks(memory_store, "frozen_lake")
    for history, wanted in ((None, [1, 2, 2, 2]), (0, [1, 1, 1, 1]), (1, [1, 2, 3, 3])):
        settings = {"turns": 4, "history": history, "rules": "Walk.", "show_instruction": False}
        for _, by_role in play("environment", ["nothing"], settings, games):
            steps = by_role["player"]
            if history is None:  # the stored messages are those that are new, and the answer before is among the old
                assert [step["prefix_length"] > 0 for step in steps] == [False, True, True, True]
            else:
                assert [len(step["messages"]) for step in steps][:2] == [wanted[0], 1 if history else wanted[1]]
            assert steps[0]["messages"][0]["content"].startswith("Walk.\n\n")


def test_a_game_cut_by_max_turns_keeps_what_it_has_paid(memory_store, play):
    games = game_tasks(memory_store, "sokoban", {"step_reward": -0.125})
    for episode, by_role in play("environment", ["left"], {"turns": 9, "rules": ""}, games, max_turns=2):
        assert episode["status"] == "max_turns"
        assert len(by_role["player"]) == 2
        assert episode["artifacts"]["trajectories"]["player"]["reward"] == -0.25


def test_gymnasiums_own_environments_are_played(play, memory_store):
    pytest.importorskip("gymnasium")
    params = {
        "id": "FrozenLake-v1",
        "arguments": {"is_slippery": False},
        "action_names": ["left", "down", "right", "up"],
    }
    settings = {"environment": "gymnasium", "params": params, "turns": 5}
    for episode, by_role in play("environment", ["right", "down"], settings, game_tasks(memory_store, "frozen_lake")):
        assert episode["status"] == "completed", episode["error"]
        assert "[S]FFF" in asked(by_role["player"][0])
        assert "S[F]FF" in asked(by_role["player"][1]) or "[F]HFH" in asked(by_role["player"][1])
        assert episode["artifacts"]["trajectories"]["player"]["reward"] == 0


@pytest.mark.parametrize(
    ("agent", "settings", "message"),
    [
        ("solver_judge", {"solver": 2}, "did you mean 'solvers'"),
        ("solver_judge", {"solvers": 0}, "greater than or equal to 1"),
        ("solver_judge", {"judge_prompt": "which?"}, r"must hold \{candidates\}"),
        ("solver_judge", {"candidate": "{text.__class__} {number}"}, "nothing else in braces"),
        ("debate", {"sides": 1}, "greater than or equal to 2"),
        ("debate", {"positions": ["yes"]}, "2 sides, and 1 positions"),
        ("refine", {"feedback": "critics"}, "'critic'"),
        ("react", {"tools": ["calculator", "calculator"]}, "twice"),
        ("react", {"sandbox": {"memory_mb": 1}}, "greater than or equal to 64"),
        ("environment", {"environment": "frozen_lak"}, "did you mean 'frozen_lake'"),
        ("environment", {"environment": "frozen_lake", "params": {"sise": 4}}, "did you mean 'size'"),
        ("environment", {"environment": "sokoban", "params": {"size": 5, "boxes": 6}}, "no room"),
    ],
)
def test_settings_that_a_pattern_does_not_take_are_refused_before_any_work(play, agent, settings, message):
    with pytest.raises(ConfigError, match=message):
        play(agent, ["x"], settings)


@pytest.mark.parametrize("metadata", [{}, {"environment": "gymnasium", "seed": 1}, {"environment": "sokoban"}])
def test_task_data_chooses_no_code_and_needs_a_seed(memory_store, policy, metadata):
    rows = task_rows(1, metadata=json.dumps(metadata))
    asked = request(
        given(memory_store, "tasks", {"tasks": rows}),
        stored_policy(memory_store, policy),
        {"agent": "environment", "engine": {"type": "scripted"}},
    )
    episode = frame(memory_store, rolled_out(memory_store, asked).manifest, "episodes").row(0, named=True)
    assert (episode["status"], episode["error_kind"]) == ("error", "InputError")


EXAMPLES = "configs/examples/agents.py"


def test_the_examples_to_copy_run(play):
    for agent, says, roles, n_steps in (
        ("refine", ["a", "b"], {"author", "critic"}, 3),
        ("solver_judge", ["0", "1", "x"], {"solver-0", "solver-1", "judge"}, 3),
        ("debate", ["a", "b"], {"side-0", "side-1"}, 4),
    ):
        for episode, by_role in play(f"{EXAMPLES}:{agent}", says):
            assert episode["status"] == "completed", episode["error"]
            assert set(by_role) == roles == set(episode["artifacts"]["answers"])
            assert sum(map(len, by_role.values())) == n_steps
    for episode, by_role in play(f"{EXAMPLES}:react", ["ADD 2 3", "5"]):
        steps = by_role["default"]
        assert [asked(step) for step in steps[1:]] == ["5"] * (len(steps) - 1)
        assert episode["artifacts"].get("answer") == (None if said(steps)[-1] == "ADD 2 3" else "5")
    for episode, by_role in play(f"{EXAMPLES}:guess_the_number", list("0123456789")):
        steps = by_role["default"]
        reward = episode["artifacts"]["trajectories"]["default"]["reward"]
        assert reward == (0 if len(steps) == 4 and reward == 0 else pytest.approx(1.1 - 0.1 * len(steps)))
