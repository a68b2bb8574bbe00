"""vLLM's own offline generation, for comparison. It runs in vLLM's environment.

Its arguments are a policy's folder and, as JSON, those of ``LLM``. Each line that it reads is a request: prompts, seeds
and sampling parameters; it answers with the ids and the seconds that ``LLM.generate`` took.
"""

import json
import sys
import time

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]
from vllm.inputs import TokensPrompt  # type: ignore[import-not-found]


def main() -> None:
    """Answers until its input ends."""
    folder, arguments = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(model=folder, **arguments)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in asked["prompts"]]
        sampling = [SamplingParams(**asked["sampling"], seed=seed) for seed in asked["seeds"]]
        began = time.perf_counter()
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        outputs = [answer.outputs[0] for answer in answers]
        if any(len(output.logprobs) != len(output.token_ids) for output in outputs):
            raise AssertionError("there is not a logprob for each token")
        print(json.dumps({"seconds": seconds, "ids": [list(output.token_ids) for output in outputs]}), flush=True)


if __name__ == "__main__":
    main()
