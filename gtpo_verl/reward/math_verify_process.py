"""math-verify in a process of its own, with a time limit that the kernel keeps.

verl calls a reward in threads of Ray workers, where math-verify's own time limit (``signal.alarm``) cannot work. So
math-verify runs in one child process per caller, which sets a timer on itself: the kernel ends it when the time is up,
even inside a computation that Python could not interrupt, and the next comparison starts a new one.
"""

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
import threading

TIMEOUT_SECONDS = 5.0
"""Time for one comparison, math-verify's own default, but CPU time: a loaded machine must not change a reward. MATH's
slowest answer takes a tenth of it."""


class MathVerifyProcess:
    """A child process that compares answers with math-verify, started at need, shared by the threads of its parent."""

    def __init__(self) -> None:
        self._forget()
        atexit.register(self._stop)
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        # Also called in a forked copy of the parent: the process and its pipes belong to the original.
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def is_equal(self, gold: str, pred: str) -> bool:
        """Return math-verify's verdict.

        Raises:
            TimeoutError: it gives none.
            RuntimeError: the process cannot start.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            verdict = self._ask(gold, pred)
            if verdict is None:
                self._stop()
                raise TimeoutError(f"math-verify gave no verdict on the answer {pred!r} (ground truth {gold!r})")
            return verdict

    def _start(self) -> None:
        # By path, not by module name: the caller's sys.path may not be the child's.
        boot = "import runpy, sys; runpy.run_path(sys.argv[1])['_serve']()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", boot, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        if not self._ask("1", "1"):
            self._stop()
            raise RuntimeError("the math-verify process cannot compare 1 with 1; see its traceback on stderr")

    def _ask(self, gold: str, pred: str) -> bool | None:
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        question = json.dumps([gold, pred, TIMEOUT_SECONDS]).encode() + b"\n"
        verdicts = {b"equal\n": True, b"different\n": False}
        try:
            self._process.stdin.write(question)
            return verdicts.get(self._process.stdout.readline())
        except BrokenPipeError:
            return None
        except BaseException:  # Ctrl-C or a caller's alarm: the next comparison would read this one's reply
            self._stop()
            raise

    def _stop(self) -> None:
        if self._process is not None:
            with self._process:
                self._process.kill()
            self._process = None


def _serve() -> None:
    """Answer each line, a JSON list ``[gold, pred, seconds]``, with ``equal`` or ``different``; the child runs this."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})  # the mask is that of the thread that started us
    logging.disable(logging.WARNING)  # math-verify warns that its own, thread-unsafe time limit is off

    from math_verify import parse, verify

    def read(answer: str) -> list:
        return parse(answer if "$" in answer else f"${answer}$", parsing_timeout=None)

    for line in sys.stdin.buffer:
        gold, pred, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        verdict = verify(read(gold), read(pred), timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(b"equal\n" if verdict else b"different\n")
