"""Agents that speak the completions API with the official client, as users have them."""

# mypy: disable-error-code="union-attr,call-overload,arg-type,index"

from openai import APIStatusError, OpenAI


def client_of(config):
    return OpenAI(base_url=config.base_url, api_key=config.api_key, max_retries=0)


def acts_and_observes(task, config):
    """A prompt that grows by answers and by what the agent adds to them."""
    client, prompt, told = client_of(config), task.instruction, []
    for turn in range(3):
        answer = client.completions.create(model=config.model, prompt=prompt, stop=["\nObservation:"], logprobs=0)
        choice = answer.choices[0]
        told.append({"text": choice.text, "reason": choice.finish_reason, "usage": answer.usage.completion_tokens})
        prompt += f"{choice.text}\nObservation: {turn}\n"
    return {"told": told}


def several_prompts(task, config):
    client = client_of(config)
    asked = {"model": config.model, "prompt": ["one ", "two "], "n": 2, "logprobs": 1, "max_tokens": 5}
    answer = client.completions.create(**asked)
    stream = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    return {
        "texts": [choice.text for choice in answer.choices],
        "streamed": ["".join(one.text for c in stream for one in c.choices if one.index == n) for n in range(4)],
        "logprobs": [choice.logprobs.token_logprobs for choice in answer.choices],
        "tokens": ["".join(choice.logprobs.tokens) for choice in answer.choices],
        "usage": [answer.usage.prompt_tokens, answer.usage.completion_tokens, stream[-1].usage.completion_tokens],
    }


def token_ids(task, config):
    client = client_of(config)
    first = client.completions.create(model=config.model, prompt=[70, 71, 300, 72])
    second = client.completions.create(model=config.model, prompt=[[70, 71, 300, 72, 80], [9]])
    return {"texts": [choice.text for choice in [*first.choices, *second.choices]]}


def wrong_calls(task, config):
    client, told = client_of(config), []

    def refused(**changed):
        try:
            client.completions.create(**({"model": config.model, "prompt": "x"} | changed))
        except APIStatusError as error:
            told.append([error.status_code, error.body["message"]])

    refused(prompt="")
    refused(prompt=[])
    refused(prompt=[1, "x"])
    refused(prompt=[[1], []])
    refused(prompt=[-1])
    refused(prompt=[999])
    refused(prompt="x" * 4000)
    refused(prompt=["x"] * 65, n=2)
    refused(echo=True)
    refused(suffix="y")
    refused(best_of=3)
    refused(logprobs=5)
    refused(model="davinci")
    return {"told": told}
