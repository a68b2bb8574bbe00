"""Keeps libraries from writing over the pipeline's own output: progress bars, and a notice that there is no GPU."""

import logging


def quiet_libraries() -> None:
    """Call before transformers is used in the pipeline's process."""
    logging.getLogger("DeepSpeed").addFilter(_serious)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def _serious(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
