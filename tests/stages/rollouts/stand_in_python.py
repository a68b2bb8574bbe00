"""Stands in for the Python with vLLM, as a program: it says that it has one, and serves as ``StandIn`` does.

stand_in_python.py -c …                                     which vLLM there is
stand_in_python.py -m … --port N --model FOLDER …           a server, until it is ended
"""

import json
import os
import sys
import threading
from itertools import pairwise
from pathlib import Path

from tests.stages.rollouts.stand_in import StandIn, shift_of

SECONDS = "STAND_IN_SECONDS"
"""An environment variable: how long an answer takes."""
BROKEN = "STAND_IN_BROKEN"
"""An environment variable: a file, and while it is there no server starts."""


def main(words: list[str]) -> int:
    if words[0] == "-c":
        print(json.dumps({"version": "0.32.0", "gpus": 0, "scale_out": False}))
        return 0
    told = {name: value for name, value in pairwise(words) if name.startswith("--")}
    folder = Path(told["--model"])
    if Path(os.environ.get(BROKEN, "/no/such/file")).exists():
        print(f"ValueError: no memory for {folder}", *map("line {}".format, range(50)), sep="\n")
        return 3
    shape = json.loads((folder / "config.json").read_text())
    server = StandIn(
        shape["vocab_size"],
        shape["max_position_embeddings"],
        name=told["--served-model-name"],
        port=int(told["--port"]),
    )
    server.shift, server.seconds = shift_of(folder), float(os.environ.get(SECONDS, 0))
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
