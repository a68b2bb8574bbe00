"""One Prefect flow a stage, so that each can be scheduled, scaled or rerun on its own."""

from collections.abc import Callable
from typing import Any

from prefect import Flow, flow

from flows.call import stage_request
from flows.execute import Executor
from flows.progress import Reporter
from stages.artifacts.store import open_store


def _stage_flow(declared: Callable[[], None]) -> Flow[..., dict[str, Any]]:
    """The flow of the stage with the function's name: ``prefect deploy`` looks for functions in this file's text."""
    name = declared.__name__

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
        with Reporter() as reporter, Executor(shelf, reporter, seed=seed, draw=draw) as executor:
            manifest = executor.run(name, request.config, request.execution, request.inputs)
        return {
            "ref": str(manifest.ref),
            "key": manifest.key,
            "store": shelf.url,
            "cached": not executor.executed,
            "summary": manifest.summary,
        }

    run.__name__ = run.__qualname__ = name
    run.__doc__ = f"""{declared.__doc__}

    Args:
        inputs: references by input name; those left out follow from the lineage of those given.
        config: settings of the stage.
        execution: settings that change no result.
        store: URL of the store.
        seed: of a stage that draws at random.
        draw: 0, 1, …: asks such a stage for another sample.
    Returns:
        the artifact's reference, key, store and summary, and whether it was on the shelf already.
    """
    return flow(name=name, persist_result=True, result_serializer="json")(run)


@_stage_flow
def tasks() -> None:
    """A benchmark or data set becomes a tasks artifact."""


@_stage_flow
def rollouts() -> None:
    """An agent attempts stored tasks under a stored policy."""


@_stage_flow
def rewards() -> None:
    """Stored rollouts are graded."""


@_stage_flow
def advantages() -> None:
    """Stored rewards become advantages."""


@_stage_flow
def policy() -> None:
    """A stored policy is updated from stored rollouts and advantages."""


@_stage_flow
def report() -> None:
    """Stored artifacts become one page."""


@_stage_flow
def policy_import() -> None:
    """A model folder, GGUF file or hf:// name becomes a policy artifact."""


@_stage_flow
def policy_init() -> None:
    """A small policy with random weights is made."""


@_stage_flow
def policy_warmstart() -> None:
    """A policy is taught stored tasks with answers."""
