"""math-verify in a process of its own."""

import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from unittest.mock import Mock

import pytest

from gtpo_verl.reward import math_verify_process, score
from gtpo_verl.reward.score import compute_score, is_equal


def scored(answer: str, ground_truth: str) -> dict:
    return compute_score("test", f"<reasoning>some thought</reasoning><answer>{answer}</answer>", ground_truth)


@pytest.mark.parametrize("answer", ["9^{9^{9^{9}}}", r"\binom{10000000}{5000000}"])
def test_a_runaway_comparison_is_a_timeout_and_the_next_one_works(answer, monkeypatch):
    assert is_equal("x+y", "y+x")  # the child has loaded what it needs before its time is cut
    monkeypatch.setattr(math_verify_process, "TIMEOUT_SECONDS", 1.0)
    result = scored(answer, "7")
    assert (result["acc"], result["timeout"], result["score"]) == (0.0, 1.0, 10.0)
    monkeypatch.undo()
    result = scored("3+4", "7")
    assert (result["acc"], result["timeout"]) == (1.0, 0.0)


def test_a_killed_child_is_replaced():
    assert is_equal("7", "3+4")
    child = score._math_verify._process
    os.kill(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_equal("7", "3+4")


def test_an_interrupted_comparison_does_not_answer_the_next_one(monkeypatch):
    assert is_equal("x+1", "1+x")
    monkeypatch.setattr(score._math_verify._process, "stdout", Mock(readline=Mock(side_effect=KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt):
        is_equal("x+1", "2+x")
    assert is_equal("x+1", "1+x")


def test_many_threads_get_their_own_verdicts():
    pairs = [(f"{a}+x", f"x+{b}") for a in range(8) for b in range(8)]
    with ThreadPoolExecutor(16) as threads:
        verdicts = list(threads.map(lambda pair: is_equal(*pair), pairs))
    assert verdicts == [a == b for a in range(8) for b in range(8)]


def test_a_forked_process_compares_with_a_child_of_its_own():
    assert is_equal("7", "3+4")
    pid = os.fork()
    if pid == 0:
        mine = score._math_verify._process is None and is_equal("7", "3+4") and not is_equal("8", "3+4")
        score._math_verify._stop()
        os._exit(0 if mine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert is_equal("7", "3+4")


@pytest.mark.parametrize("end", ["pass", "os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_the_child_does_not_outlive_its_parent(end):
    script = (
        "import os, signal\nfrom gtpo_verl.reward import score\n"
        "assert score.is_equal('7', '3+4')\nprint(score._math_verify._process.pid, flush=True)\n" + end
    )
    parent = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=900)
    with suppress(ProcessLookupError):
        child = os.pidfd_open(int(parent.stdout))
        assert select.select([child], [], [], 300)[0], "the math-verify process is still there"
        os.close(child)


def test_a_process_that_compares_nothing_is_an_error(monkeypatch):
    monkeypatch.setattr(math_verify_process.sys, "executable", "/bin/true")
    with pytest.raises(RuntimeError, match="cannot compare 1 with 1"):
        math_verify_process.MathVerifyProcess().is_equal("x", "y")
