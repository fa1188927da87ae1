"""A test's limit counts CPU time of the test and of its child processes; waiting is free; hangs end."""

from __future__ import annotations

import pytest

from tests.test_layout import ROOT

pytest_plugins = ["pytester"]

# name -> (a test with a limit of a quarter of a second, its outcome, what it says)
CASES = {
    "waiting": ("time.sleep(1.5)", "passed", ""),
    "computing": ("while True: pass", "failed", "more than 0.25 s of CPU time"),
    "a thread that computes": (
        "import threading\n"
        "    thread = threading.Thread(target=lambda: all(True for _ in iter(int, 1)), daemon=True)\n"
        "    thread.start(); thread.join()",
        "failed",
        "more than 0.25 s of CPU time",
    ),
    "a process that computes": (
        "import subprocess, sys\n"
        "    subprocess.run([sys.executable, '-c', 'import time\\nwhile time.process_time() < 1.0: pass'])",
        "failed",
        "took too much CPU time",
    ),
    "a hang": ("time.sleep(60)", "failed", "Timeout"),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_limits_count_cpu_time(case, pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # others take seconds to load
    body, outcome, words = CASES[case]
    limits = (ROOT / "tests" / "conftest.py").read_text()
    assert limits.count("HANG = 10\n") == 1
    pytester.makeconftest(limits if case == "a hang" else limits.replace("HANG = 10\n", "HANG = 200\n"))
    pytester.makepyfile(f"import time\nimport pytest\n\n@pytest.mark.timeout(0.25)\ndef test_it():\n    {body}\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "pytest_timeout")
    result.assert_outcomes(**{outcome: 1})
    said = result.stdout.str() + result.stderr.str()
    assert words in said and ("Timeout" in said) == (case == "a hang")
