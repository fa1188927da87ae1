"""States of several processes: of one step in all of them, without the same tensor twice, of no other number."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.toys import TwoProcesses
from vla_rl.contract.errors import UserError
from vla_rl.training import checkpoint
from vla_rl.training.checkpoint import latest_shared, read_state, save_shared
from vla_rl.training.tracking import RunFolder


def state(step: int, rank: int) -> dict[str, Any]:
    """Weights that both have, of which some look alike, and the source of each; the second also has a buffer."""
    learner = {"weights": torch.full((4,), float(step)), "moments": torch.full((4,), float(step)), "count": step}
    own = {"buffer": torch.arange(3.0)} if rank else {}
    return {"learner": learner, "source": {"noise": torch.tensor([10.0 * step + rank]), "name": f"{rank}"}, **own}


def in_both(do: Callable[[TwoProcesses], Any]) -> list[Any]:
    """``do`` in two processes, which are threads."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(do, TwoProcesses.pair()))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(item, other[name]) for name, item in one.items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_each_process_gets_its_own_state_and_what_is_common_is_there_once(tmp_path: Path) -> None:
    in_both(lambda group: save_shared(tmp_path, 7, state(7, group.rank), group))
    found = in_both(lambda group: latest_shared(tmp_path, group))
    for rank in (0, 1):
        assert found[rank][0] == 7 and same(found[rank][1], state(7, rank))
    with safe_open(tmp_path / "process-1" / "state" / "00000007" / "tensors.safetensors", "pt") as file:
        assert set(file.keys()) == {"state/source/noise", "state/buffer"}


def test_killed_before_the_last_file_both_go_on_from_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process has written the new step, the first has not; two more times, so that none is cleared away."""
    real = checkpoint.write_state

    def killed(folder: Path, *given: Any) -> None:
        if folder == tmp_path / "state":
            raise KeyboardInterrupt
        real(folder, *given)

    for step in (1, 2):
        in_both(lambda group, step=step: save_shared(tmp_path, step, state(step, group.rank), group))
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "write_state", killed)
            patch.setattr(checkpoint, "_wait", lambda group: None)
            with pytest.raises(KeyboardInterrupt):
                in_both(lambda group: save_shared(tmp_path, 3, state(3, group.rank), group))
        assert (tmp_path / "process-1" / "state" / "00000003").exists()
        found = in_both(lambda group: latest_shared(tmp_path, group))
        assert [step for step, _ in found] == [2, 2] and same(found[1][1], state(2, 1))
    in_both(lambda group: save_shared(tmp_path, 3, state(3, group.rank), group))
    assert [step for step, _ in in_both(lambda group: latest_shared(tmp_path, group))] == [3, 3]


def test_nothing_saved_is_none_and_a_lost_part_is_said(tmp_path: Path) -> None:
    assert in_both(lambda group: latest_shared(tmp_path, group)) == [None, None]
    in_both(lambda group: save_shared(tmp_path, -1, state(0, group.rank), group))
    assert [step for step, _ in in_both(lambda group: latest_shared(tmp_path, group))] == [-1, -1]
    path = tmp_path / "process-1" / "state" / "-0000001"
    (path / "tensors.safetensors").unlink()
    with pytest.raises(UserError, match=r"process-1.*is damaged"):
        read_state(path, tmp_path / "state" / "-0000001")


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    for group in TwoProcesses.pair():
        RunFolder(tmp_path / "run", {"seed": 1}, group).close()
    with pytest.raises(UserError, match=r"begun by 2 and would go on with 1 .* torchrun --nproc-per-node 2 -m vla_rl"):
        RunFolder.resume(tmp_path / "run")
    RunFolder(tmp_path / "alone", {"seed": 1}).close()
    first, second = TwoProcesses.pair()
    with pytest.raises(UserError, match=r"begun by 1 and would go on with 2 .* vla-rl train --resume"):
        RunFolder.resume(tmp_path / "alone", second)
    found = [RunFolder.resume(tmp_path / "run", group) for group in (first, second)]
    assert [folder.path for folder in found] == [tmp_path / "run", tmp_path / "run" / "process-1"]
    for folder in found:
        folder.close()


def test_a_process_that_was_ready_before_the_others_goes_on(tmp_path: Path) -> None:
    """Killed at the very end: its summary is there already, that of the run is not."""
    for group in TwoProcesses.pair():
        RunFolder(tmp_path / "run", {"seed": 1}, group).close()
    (tmp_path / "run" / "process-1" / "summary.json").write_text(json.dumps({}))
    RunFolder.resume(tmp_path / "run", TwoProcesses.pair()[1]).close()
    (tmp_path / "run" / "summary.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match="is finished"):
        RunFolder.resume(tmp_path / "run", TwoProcesses.pair()[1])
