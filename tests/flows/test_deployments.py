"""Scheduled use, against a real Prefect server: what is served runs with parameters, fails visibly, restarts."""

import signal
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prefect import Flow

import flows.stages
from flows.call import stage_request
from flows.deployments import FILE, read_deployments
from flows.evaluate import evaluate
from flows.recipes import EvaluateRecipe, TrainRecipe, load_recipe
from flows.registry import STAGE_NAMES, stage_named
from flows.train import train
from schemas.artifacts import Manifest
from schemas.config import validated
from schemas.errors import ConfigError
from stages.artifacts.scan import scan
from stages.artifacts.store import Store, open_store
from tests.builders import stored_policy, stored_rollouts, stored_run, stored_tasks
from tests.flows.background import LIMIT_S, Background, background
from tests.flows.commands import ROLLMILL, command, rollmill
from tests.flows.test_interrupt import SLEEPY
from tests.flows.trained import recipe

DEPLOYMENTS = read_deployments()


def test_every_flow_has_a_deployment_with_a_schedule_that_is_off():
    stage_flows = {flow.name for flow in vars(flows.stages).values() if isinstance(flow, Flow)}
    assert stage_flows == set(STAGE_NAMES)
    assert {each.flow.name for each in DEPLOYMENTS.values()} == stage_flows | {train.name, evaluate.name}
    for name, each in DEPLOYMENTS.items():
        assert name == f"{each.flow.name}/{each.name}"
        assert each.description, name
        assert each.parameters, name
        assert [schedule.active for schedule in each.schedules] == [False], name


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_parameters_of_a_deployment_are_those_of_its_flow(store, name):
    each = DEPLOYMENTS[name]
    each.flow.validate_parameters(each.parameters)
    given = each.parameters
    if each.flow in (train, evaluate):
        model = TrainRecipe if each.flow is train else EvaluateRecipe
        load_recipe(model, given["recipe"], given["overrides"], given["store"])
        return
    stage = stage_named(each.flow_name)
    validated(stage.Execution, given.get("execution", {}), name)
    if each.flow_name == "policy_import":  # the model's folder is the user's
        validated(stage.Config, given.get("config", {}), name)
        return
    stored_run(store, "nightly")
    of_stage = {key: given.get(key, {}) for key in ("inputs", "config", "execution")}
    stage_request(store, each.flow_name, **of_stage)


def test_an_unknown_setting_of_a_deployment_is_refused_with_the_nearest(tmp_path):
    file = tmp_path / "prefect.yaml"
    file.write_text(FILE.read_text().replace("cron:", "crom:", 1))
    with pytest.raises(ConfigError, match=r"crom.*did you mean 'cron'"):
        read_deployments(file)


@pytest.mark.parametrize(
    ("url", "words", "message"),
    [
        ("", [], "set PREFECT_API_URL"),
        ("http://127.0.0.1:9/api", ["rewards/reward"], "did you mean 'rewards/rewards'?"),
        ("http://127.0.0.1:9/api", [], "the Prefect server at http://127.0.0.1:9/api does not answer"),
    ],
)
def test_serve_says_what_it_lacks(url, words, message):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: url}):
        done = rollmill("serve", *words)
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert message in done.err
    assert "Traceback" not in done.text


@dataclass(frozen=True)
class Server:
    """A Prefect server, and how to serve deployments for it."""

    url: str
    folder: Path

    def serving(self, *words: str) -> AbstractContextManager[Background]:
        """``rollmill serve`` with these words, in the server's folder."""
        env = {"PREFECT_API_URL": self.url, "PREFECT_RUNNER_POLL_FREQUENCY": "1"}
        return background(command("serve", *words), self.folder / "serve.log", env, self.folder)

    def run(self, name: str, timeout_s: float = LIMIT_S, **parameters: Any) -> Any:
        """The flow run of a deployment, when it has ended or the time is over."""
        from prefect.deployments import run_deployment

        return run_deployment(name, parameters=parameters, timeout=timeout_s, poll_interval=0.2)


@dataclass(frozen=True)
class Served(Server):
    """A server, and the process that serves the deployments for it."""

    serving_process: Background


def is_served(serving: Background) -> bool:
    return "are being served" in serving.output


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a database of its own; this process speaks to it."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    folder = tmp_path_factory.mktemp("server")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [
        str(ROLLMILL.with_name("prefect")),
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--no-ui",
    ]
    env = {"PREFECT_HOME": str(folder / "home"), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    url = f"http://127.0.0.1:{port}/api"
    with background(words, folder / "server.log", env, folder) as running:
        running.wait_until(lambda: answers(url))
        with temporary_settings({PREFECT_API_URL: url}):
            yield Server(url, folder)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=60) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.fixture
def rollouts(store: Store) -> Manifest:
    tasks, policy = stored_tasks(store), stored_policy(store)
    return stored_rollouts(store, tasks, policy)


@pytest.mark.slow
def test_what_was_switched_on_or_added_at_the_server_survives_a_restart_of_serve(server, request):
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule

    def schedules() -> list[tuple[str, bool, str]]:
        with get_client(sync_client=True) as client:
            deployment = client.read_deployment_by_name("tasks/tasks")
            assert not deployment.paused
            found = [(each.slug or "", each.active, each.schedule) for each in deployment.schedules]
            return sorted((slug, active, getattr(schedule, "cron", "")) for slug, active, schedule in found)

    with server.serving("tasks/tasks") as serving:
        serving.wait_until(lambda: is_served(serving))
        assert schedules() == [("daily", False, "0 1 * * *")]
        with get_client(sync_client=True) as client:
            deployment = client.read_deployment_by_name("tasks/tasks")
            client.update_deployment_schedule(deployment.id, deployment.schedules[0].id, active=True)
            by_hand = DeploymentScheduleCreate(schedule=CronSchedule(cron="5 5 1 1 *", timezone="UTC"), active=True)
            client.create_deployment_schedules(deployment.id, [by_hand])
        assert serving.ended_by(signal.SIGTERM) in (0, -signal.SIGTERM)
    switched = [("", True, "5 5 1 1 *"), ("daily", True, "0 1 * * *")]
    assert schedules() == switched
    request.getfixturevalue("served")
    assert schedules() == switched


@pytest.fixture(scope="module")
def served(server: Server) -> Iterator[Served]:
    """All deployments, served from here on: the test before this serves for itself."""
    with server.serving() as serving:
        serving.wait_until(lambda: is_served(serving))
        yield Served(server.url, server.folder, serving)


@pytest.mark.slow
def test_a_rewards_deployment_scores_stored_rollouts_again(served, store, rollouts):
    run = served.run(
        "rewards/rewards", inputs={"rollouts": str(rollouts.ref)}, config={"grader": "numeric"}, store=store.url
    )
    assert run.state.is_completed(), run.state.message
    result = run.state.result()
    rewards = store.resolve(result["ref"], kind="rewards")
    assert rewards.key == result["key"]
    assert rewards.inputs["rollouts"] == [rollouts.ref]
    assert rewards.config["grader"] == "numeric"
    assert [str(node.ref) for _, name, node, _ in store.lineage(rewards).walk() if name == "rollouts"] == [
        str(rollouts.ref)
    ]
    correct = scan(rewards, "rewards", store=store).filter(is_correct=True).select("episode_id").collect()
    assert sorted(correct["episode_id"]) == ["t002-0", "t002-1"]
    assert result["summary"]["mean_reward"] == pytest.approx(1 / 3)
    assert not result["cached"]


@pytest.mark.slow
def test_a_flow_run_that_fails_is_told_by_its_state(served, store, rollouts):
    run = served.run(
        "rewards/rewards", inputs={"rollouts": str(rollouts.ref)}, config={"grader": "numerik"}, store=store.url
    )
    assert run.state.is_failed()
    assert "did you mean 'numeric'?" in run.state.message
    assert not (Path(store.url) / "artifacts" / "rewards").exists()


@pytest.mark.slow
def test_a_train_deployment_trains_with_the_recipe_it_is_given(served, tmp_path, grader_file):
    given = recipe(grader_file) | {"iterations": 1}
    run = served.run("train/nightly", recipe=given, overrides=["run=tonight"], store=str(tmp_path / "store"))
    assert run.state.is_completed(), run.state.message
    result = run.state.result()
    store = open_store(tmp_path / "store", writable=False)
    (record,) = store.iterations("tonight")
    assert result["run"] == "tonight"
    assert result["artifacts"] == {name: str(ref) for name, ref in record.artifacts.items()}
    assert store.resolve(result["artifacts"]["policy"]).inputs["policy"] == [record.artifacts["policy_in"]]


@pytest.mark.slow
def test_prefect_deploy_registers_the_same_file(server):
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.actions import WorkPoolCreate

    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="rollmill", type="process"))
    words = [str(ROLLMILL.with_name("prefect")), "--no-prompt", "deploy", "--prefect-file", str(FILE), "--all"]
    env = {"PREFECT_API_URL": server.url}
    with background(words, server.folder / "deploy.log", env, FILE.parents[1]) as running:
        assert running.process.wait(LIMIT_S) == 0, running.output
    with get_client(sync_client=True) as client:
        for name, each in DEPLOYMENTS.items():
            deployed = client.read_deployment_by_name(name)
            assert deployed.work_pool_name == "rollmill"
            assert deployed.entrypoint == each.entrypoint
            assert deployed.parameters == each.parameters
            assert {schedule.slug for schedule in deployed.schedules} >= {schedule.slug for schedule in each.schedules}


@pytest.mark.slow
def test_an_interrupted_serve_ends_soon_and_cancels_what_is_at_work(served, store, rollouts, tmp_path):
    from prefect.client.orchestration import get_client

    grader, flag = tmp_path / "grader.py", tmp_path / "flag"
    grader.write_text(SLEEPY)
    run = served.run(
        "rewards/rewards",
        timeout_s=0,
        inputs={"rollouts": str(rollouts.ref)},
        config={"grader": f"{grader}:sleepy", "params": {"flag": str(flag)}, "timeout_s": 3600},
        store=store.url,
    )
    served.serving_process.wait_until(flag.exists)
    assert len(served.serving_process.left()) > 2, "the flow run and its grading worker are processes of their own"
    assert served.serving_process.ended_by(signal.SIGINT) == 0
    with get_client(sync_client=True) as client:
        state = client.read_flow_run(run.id).state
    assert state is not None
    assert state.is_cancelled()
