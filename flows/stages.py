"""One Prefect flow a stage, so that each can be scheduled, scaled or rerun on its own."""

from typing import Any

from prefect import Flow, flow

from flows.call import stage_request
from flows.execute import Executor
from flows.progress import Reporter
from stages.artifacts.store import open_store


def _stage_flow(name: str, purpose: str) -> Flow[..., dict[str, Any]]:
    def run(
        inputs: dict[str, str | list[str]] | None = None,
        config: dict[str, Any] | None = None,
        execution: dict[str, Any] | None = None,
        store: str = "./store",
        seed: int = 0,
        draw: int = 0,
    ) -> dict[str, Any]:
        shelf = open_store(store)
        request = stage_request(
            shelf, name, inputs=inputs or {}, config=config or {}, execution=execution or {}, seed=seed, draw=draw
        )
        with Reporter() as reporter:
            executor = Executor(shelf, reporter, seed=seed, draw=draw)
            manifest = executor.run(name, request.config, request.execution, request.inputs)
        return {
            "ref": str(manifest.ref),
            "key": manifest.key,
            "cached": not executor.executed,
            "summary": manifest.summary,
        }

    run.__name__ = run.__qualname__ = name
    run.__doc__ = f"{purpose}\n\nInputs are references by input name; those left out follow from the lineage."
    return flow(run, name=name, persist_result=True, result_serializer="json")


tasks = _stage_flow("tasks", "A benchmark or data set becomes a tasks artifact.")
rollouts = _stage_flow("rollouts", "An agent attempts stored tasks under a stored policy.")
rewards = _stage_flow("rewards", "Stored rollouts are graded.")
advantages = _stage_flow("advantages", "Stored rewards become advantages.")
policy = _stage_flow("policy", "A stored policy is updated from stored rollouts and advantages.")
report = _stage_flow("report", "Stored artifacts become one page.")
policy_import = _stage_flow("policy_import", "A model folder, GGUF file or hf:// name becomes a policy artifact.")
policy_init = _stage_flow("policy_init", "A small policy with random weights.")
policy_warmstart = _stage_flow("policy_warmstart", "A policy is taught stored tasks with answers.")
