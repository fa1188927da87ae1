"""`make test-plain` runs the numerical tests with the kernels of a processor that has few vector instructions."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.patience import PATIENCE
from tests.test_layout import ROOT

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
SETTINGS = dict(setting.split("=") for setting in re.search(r"^\t(ATEN\S+ ONEDNN\S+) ", MAKEFILE, re.M)[1].split())


@pytest.mark.full
def test_torch_obeys():
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    environment = {**os.environ, **SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    assert done.stdout.strip() == "DEFAULT" and SETTINGS["ONEDNN_MAX_CPU_ISA"] == "SSE41"
