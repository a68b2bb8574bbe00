"""Code that nobody trusts: what it prints comes back, and what it tries beyond that does not work."""

import subprocess
import sys

import pytest

from stages.rollouts.patterns import sandbox
from stages.rollouts.patterns.calculator import CalculatorError, calculate
from stages.rollouts.patterns.react import parsed
from stages.rollouts.patterns.sandbox import Ran, SandboxLimits, run_python

SHORT = SandboxLimits(time_s=1)
AMPLE = SandboxLimits(time_s=120)
"""Of time, for what must not end by it on a busy machine."""


def test_programs_print_and_may_use_the_standard_library_and_files_of_their_own():
    code = "import math, json\nopen('a', 'w').write('hi')\nprint(math.comb(5, 2), json.dumps(open('a').read()))"
    assert run_python(code, AMPLE) == Ran('10 "hi"\n', "ok")
    assert run_python("raise SystemExit(3)", AMPLE) == Ran("", "ok")


def test_an_exception_is_told_by_its_last_line():
    assert run_python("print(1)\n1 / 0", AMPLE) == Ran("1\nZeroDivisionError: division by zero\n", "error")
    assert run_python("print(", AMPLE).output.endswith("SyntaxError: '(' was never closed\n")


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(600)", "while True:\n try: 1/0\n except: pass"]
)
def test_a_program_without_end_is_ended_at_its_limit(code):
    assert run_python(code, SHORT).status == "timeout"


def test_a_program_that_ignores_its_alarm_runs_out_of_processor_time():
    code = "import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass"
    assert run_python(code, SandboxLimits(time_s=0.2)).status in ("timeout", "killed")


def test_memory_is_limited():
    assert run_python("x = bytearray(10**9)", AMPLE) == Ran("MemoryError\n", "error")


@pytest.mark.parametrize("code", ["print('x' * 10**7)", "while True: print('y' * 1000)"])
def test_output_is_bounded(code):
    ran = run_python(code, SandboxLimits(time_s=120, output_chars=100))
    assert ran.status == "killed"
    assert len(ran.output) == 101


@pytest.mark.parametrize(
    "code",
    [
        "print(open('/etc/passwd').read())",
        "import os; print(os.listdir('/'))",
        "open('/tmp/rollmill-was-here', 'w').write('x')",
        "open('../output', 'a').write('x')",
        "import socket; socket.create_connection(('127.0.0.1', 80))",
        "import os; os.fork()",
        "import os; os.system('id')",
        "import subprocess; subprocess.run(['id'])",
        "import os; os.kill(os.getppid(), 9)",
        "import ctypes; ctypes.CDLL(None).getpid()",
    ],
)
def test_files_network_and_processes_are_out_of_reach(code):
    ran = run_python(code, AMPLE)
    assert ran.status == "error"
    assert "PermissionError" in ran.output


def test_no_environment_is_handed_on(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sk-secret")
    assert "sk-secret" not in run_python("import os; print(dict(os.environ))", AMPLE).output


def test_the_kernel_refuses_files_by_itself_where_it_has_landlock():
    code = (
        "import ctypes, sys\n"
        f"sys.path.insert(0, {str(sandbox._CHILD.parent)!r})\n"
        "import sandbox_child\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "has_landlock = libc.syscall(444, None, 0, 1) >= 1\n"
        "sandbox_child._forbid_files(libc, [], ['/tmp'])\n"
        "try: open('/etc/passwd')\n"
        "except PermissionError: refused = True\n"
        "else: refused = False\n"
        "assert refused == has_landlock, (refused, has_landlock)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 * (3 + 4)", "14"), ("7 / 2", "3.5"), ("6 / 2", "3"), ("2 ^ 10", "1024"), ("sqrt(2)", "1.4142135623730951"),
     ("max(1, 2, 3) - -1", "4"), ("7 // 2 % 2", "1"), ("2 ** -1", "0.5")],
)  # fmt: skip
def test_the_calculator_computes(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [("9 ** 9 ** 9", "too large"), ("1 / 0", "zero"), ("__import__('os')", "no function"), ("x", "only numbers"),
     ("2 +", "no expression"), ("'a' * 9", "only numbers"), ("(1).real", "only numbers"), ("1" * 1001, "longer"),
     ("exp(999)", "range"), ("(-8) ** 0.5", "real|complex"), ("sqrt(-1)", "domain|nonnegative"),
     ("True + 1", "only numbers")],
)  # fmt: skip
def test_the_calculator_refuses_what_is_no_arithmetic(expression, why):
    with pytest.raises(CalculatorError, match=why):
        calculate(expression)


def test_react_reads_the_first_action_or_answer():
    assert parsed("Hm.\nAction: python\nInput:\n```python\nprint([1])\n```\nthen") == (("python", "print([1])"), None)
    assert parsed("Action: calculator\nInput: 1 + 1") == (("calculator", "1 + 1"), None)
    assert parsed("So\nAnswer: 42 apples ") == (None, "42 apples")
    assert parsed("Answer: 1\nAction: calculator\nInput: 2") == (None, "1")
    assert parsed("Action: calculator") == (None, None)
