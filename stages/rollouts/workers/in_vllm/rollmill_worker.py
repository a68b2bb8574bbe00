"""Loaded into vLLM's worker processes: gives a running model the weights of another folder of the same shape.

It runs in vLLM's environment and imports nothing of Rollmill.
"""

from typing import Any


class RollmillWorker:
    """Added to the worker's own class by ``--worker-extension-cls``."""

    def rollmill_reload(self: Any, folder: str) -> None:
        """vLLM's own reload, and after it what that forgets on the CPU: an output head that is tied to the embedding
        was packed from the old weights."""
        self.reload_weights(weights_path=folder)
        for module in self.get_model().modules():
            weight = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
                module.quant_method.process_weights_after_loading(module)
