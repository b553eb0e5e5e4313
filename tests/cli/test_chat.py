"""``treadle chat`` on the built-in model: through pipes that misbehave, and in a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.test_commands import clean_environment, treadle

CHAT = [sys.executable, "-m", "treadle.cli", "chat", "--temperature", "0", "--threads", "1"]


def chat(stdin: bytes, *options: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*CHAT, *options],
        input=stdin,
        capture_output=True,
        timeout=120,
        env=clean_environment(),
        check=False,
    )


def test_a_full_context_drops_the_question_and_goes_on() -> None:
    questions = "Tell me of Rome.\nAnd of Paris?\n/clear\nWhat is the capital of France?\n"
    result = treadle(*CHAT[3:], "--context", "128", stdin=questions)
    assert result.returncode == 0
    full, hint, cleared = result.stderr.splitlines()
    assert re.search(r"the prompt has \d+ tokens, but the context holds 128 ", full)
    assert "/clear" in hint
    assert cleared == "Conversation forgotten."
    assert "Rome" in result.stdout
    assert "Paris" in result.stdout.splitlines()[-1]


def test_a_question_that_is_too_long_is_forgotten() -> None:
    questions = "word " * 500 + "\nWhat is the capital of France?\n"
    result = treadle(*CHAT[3:], "--context", "128", stdin=questions)
    assert result.returncode == 0
    assert "but the context holds 128 tokens" in result.stderr
    assert "Paris" in result.stdout


def test_bytes_that_are_no_text_do_not_end_the_conversation() -> None:
    result = chat(b"caf\xe9\nWhat is the capital of France?\n", "--max-tokens", "32")
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"Paris" in result.stdout


@pytest.mark.parametrize(
    ("redirection", "words"),
    [
        ("<&-", "chat reads questions from standard input, which is closed"),
        (">/dev/full", "No space left on device"),
    ],
)
def test_closed_and_full_ends_are_one_line(redirection: str, words: str) -> None:
    result = subprocess.run(
        ["/bin/sh", "-c", f'"$@" {redirection}', "sh", *CHAT, "--max-tokens", "2"],
        input="Hi\n",
        capture_output=True,
        text=True,
        timeout=120,
        env=clean_environment(),
        check=False,
    )
    assert result.returncode == 1
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


class Terminal:
    """What a user does and sees in a terminal."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.screen = ""

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Everything up to the first match, which is then gone from the screen."""
        deadline = time.monotonic() + 120
        while not (found := re.search(pattern, self.screen, re.DOTALL)):
            readable, _, _ = select.select([self.fd], [], [], max(0, deadline - time.monotonic()))
            assert readable, f"no {pattern!r} in {self.screen!r}"
            self.screen += os.read(self.fd, 65536).decode("utf-8", "replace")
        shown, self.screen = self.screen[: found.end()], self.screen[found.end() :]
        return shown

    def wait_for_sleep(self, pid: int) -> None:
        """Until a program that has shown a key waits for the next one.

        Python's readline does not notice a signal between the two, and no person is that fast.
        """
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.001)


def test_ctrl_c_stops_an_answer_and_bye_ends() -> None:
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(sys.executable, CHAT, {**clean_environment(), "TERM": "dumb"})
    terminal = Terminal(fd)
    try:
        terminal.wait_for("Ctrl-C stops an answer.*>>> ")
        terminal.type("Write a story about a dragon, as long as you can.\n")
        terminal.wait_for("as you can.\r\n.*[a-z]+ [a-z]+ [a-z]+ ")
        terminal.type("\x03")
        stopped = terminal.wait_for(">>> ")
        assert len(stopped) < 4000  # the whole answer has more than 30000 characters
        terminal.type("half a ques")
        terminal.wait_for("half a ques")
        terminal.wait_for_sleep(pid)
        terminal.type("\x03")
        terminal.wait_for(">>> ")
        terminal.type("What is the capital of France?\n")
        assert "Paris" in terminal.wait_for("France\\?\r\n.*>>> ")
        terminal.type("/bye\n")
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    finally:
        os.close(fd)  # hangs up, which ends a program that is still there
