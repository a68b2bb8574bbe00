"""A program that knows nothing of Rollmill: it reads a question, asks the endpoint in its environment, and answers."""

import json
import os
import subprocess
import sys
import time
import urllib.request


def first_to_make(path):
    """Whether nobody has made the file before; it is there afterwards."""
    try:
        open(path, "x").close()
    except FileExistsError:
        return False
    return True


how = sys.argv[1]
question = os.environ["ROLLMILL_TASK"] if how == "env" else sys.stdin.read()
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": question}]}
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers
)
with urllib.request.urlopen(request) as answer:
    text = json.load(answer)["choices"][0]["message"]["content"]
if how == "fails":
    sys.exit("it went wrong with " + os.environ["OPENAI_API_KEY"])
if how == "hangs":
    subprocess.Popen(["sleep", "600"])
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    time.sleep(600)
if how == "waits" and not first_to_make(sys.argv[2]):
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    time.sleep(600)
if how == "env":
    with open(os.environ["ROLLMILL_ANSWER_FILE"], "w", encoding="utf-8") as file:
        file.write(f"{question} {text}")
else:
    subprocess.Popen(["sleep", "600"])  # holds standard output open
    print(question, text)
