"""Settings of the vLLM engine: what changes the samples, and apart from it how the workers are run."""

from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from schemas.config import ConfigModel

EXECUTION_ARGS = frozenset(
    {
        "async_scheduling", "block_size", "compilation_config", "cpu_offload_gb", "cudagraph_capture_sizes",
        "data_parallel_size", "disable_custom_all_reduce", "disable_log_stats", "distributed_executor_backend",
        "download_dir", "enable_chunked_prefill", "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization",
        "kv_cache_memory_bytes", "load_format", "max_cudagraph_capture_size", "max_num_batched_tokens", "max_num_seqs",
        "max_parallel_loading_workers", "num_gpu_blocks_override", "optimization_level", "pipeline_parallel_size",
        "prefix_caching_hash_algo", "safetensors_load_strategy", "scheduling_policy", "swap_space",
    }
)  # fmt: skip
"""vLLM's arguments of which samples do not depend, but for the last bits of the arithmetic."""
OWN_ARGS = frozenset(
    {
        "api_key", "config", "dtype", "enable_lora", "enable_scale_out", "generation_config", "host", "logprobs_mode",
        "lora_modules", "max_lora_rank", "model", "port", "return_tokens_as_token_ids", "seed", "served_model_name",
        "tensor_parallel_size", "tokenizer", "uds", "uvicorn_log_level", "worker_extension_cls",
    }
)  # fmt: skip
"""Those that Rollmill sets itself."""


class VllmConfig(ConfigModel):
    """vLLM workers."""

    type: Literal["vllm"]
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Number format of weights and activations. auto: as the policy's weights are stored."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of vLLM's server that change what is sampled (``quantization``, ``kv_cache_dtype``, ``max_model_len``,
    …), by name with underscores; those that do not belong in ``execution``."""

    @model_validator(mode="before")
    @classmethod
    def _execution_is_set_elsewhere(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name in sorted(set(values) & set(VllmExecution.model_fields) - {"args"}):
                raise ValueError(f"{name} only changes how the work is done: set it in execution.rollouts.vllm")
        return values

    @field_validator("args")
    @classmethod
    def _change_samples(cls, args: dict[str, Any]) -> dict[str, Any]:
        _refuse(args, OWN_ARGS, "Rollmill sets it itself")
        return _refuse(args, EXECUTION_ARGS, "it changes no sample: set it in execution.rollouts.vllm.args")


class VllmExecution(ConfigModel):
    """How vLLM workers are run."""

    workers: Literal["auto"] | int | list[str] = "auto"
    """auto: one for each group of ``tensor_parallel`` visible GPUs, one where there is none. A number: so many. URLs
    (``http://host:port``): these, as they are; they are never stopped."""
    python: str | None = None
    """Python of an environment with vLLM 0.20 or later. None: ``ROLLMILL_VLLM_PYTHON``, or else
    ``.venv-vllm/bin/python`` in the working folder, which ``make vllm`` makes."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs a worker."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of vLLM's server that change no sample (``gpu_memory_utilization``, ``max_num_seqs``, …)."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the workers, besides the pipeline's own. Not for credentials."""
    lora_rank: int | None = Field(default=None, ge=1, le=512)
    """Workers are started ready for adapters up to this rank. None: for the policy that they start with, so the first
    adapter of a training, and one of a higher rank, costs a restart."""
    update: Literal["auto", "in_place", "restart"] = "auto"
    """How a running worker gets another policy. auto: in place, and where that does not give the right numbers, by a
    restart; given workers are left as they are. in_place: also given ones, which must see the folder of the policy."""
    port: int | None = Field(default=None, ge=1, le=65_535)
    """Port of the first worker on this machine; the next ones, and who finds one taken, use the next. None: any free
    one."""
    log_dir: str | None = None
    """Folder for the workers' logs. None: ``ROLLMILL_LOGS``, or else ``logs`` in the working folder; in it, a folder of
    the run's own where the rollouts are part of one."""
    start_timeout_s: float = Field(default=900, gt=0)
    """From start to ready."""
    request_timeout_s: float = Field(default=3600, gt=0)
    """For one model call, waiting in the worker's queue included; then it is asked elsewhere."""
    health_interval_s: float = Field(default=2.0, gt=0)
    """Between two looks at a worker."""
    hang_timeout_s: float = Field(default=60, gt=0)
    """A worker that gives no sign of life for so long is replaced."""
    stall_timeout_s: float = Field(default=300, gt=0)
    """A worker that has calls and does not advance by one token for so long is replaced."""
    max_failures: int = Field(default=4, ge=1)
    """Failed starts, or failures without one good answer between them, after which a worker is given up."""
    backoff_s: float = Field(default=2.0, gt=0)
    """Before the first restart; doubled each time, up to a minute."""
    gone_timeout_s: float = Field(default=1200, gt=0)
    """With no worker to serve for so long, the stage fails."""
    max_in_flight: int = Field(default=1024, ge=1)
    """Model calls at one worker at most; how many it really gets adapts to what it reports."""

    @property
    def starts_workers(self) -> bool:
        """Whether workers are started here, and not given by URL."""
        return not isinstance(self.workers, list)

    @field_validator("workers")
    @classmethod
    def _some(cls, workers: "str | int | list[str]") -> "str | int | list[str]":
        if workers == [] or (isinstance(workers, int) and workers < 1):
            raise ValueError("there must be one worker at least")
        for url in workers if isinstance(workers, list) else []:
            if not _is_url(url):
                raise ValueError(f"{url!r} is no URL such as http://host:8000")
        return workers

    @field_validator("args")
    @classmethod
    def _change_no_sample(cls, args: dict[str, Any]) -> dict[str, Any]:
        _refuse(args, OWN_ARGS, "Rollmill sets it itself")
        return _refuse(args, set(args) - EXECUTION_ARGS, "it may change samples: set it in rollouts.engine.args")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # its port is none
        return False


def _refuse(args: dict[str, Any], names: "set[str] | frozenset[str]", why: str) -> dict[str, Any]:
    for name in sorted(set(args) & names):
        raise ValueError(f"args.{name}: {why}")
    return args
