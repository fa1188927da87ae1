"""Training states on disk: they come back as they were, and a write that fails or is killed loses nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.held import Killed
from tests.toys import TwoProcesses
from vla_rl.contract.errors import UserError
from vla_rl.training import checkpoint
from vla_rl.training.checkpoint import latest_shared, latest_state, read_state, save_shared, save_state
from vla_rl.training.tracking import RunFolder


def tree():
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2, 3))], lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.full((2, 3), 0.5)
    optimizer.step()
    return {
        "generator": generator.get_state(),
        "optimizer": optimizer.state_dict(),
        "numbers": [1, 0.1, True, None, "text", 2**62],
        "arrays": {
            "i8": np.arange(3, dtype=np.int8),
            "f8": np.array(1 / 3),
            "none": np.zeros((0, 4)),
            "b": np.eye(2) > 0,
        },
        "bf16": torch.ones(2, dtype=torch.bfloat16),
        7: "keys keep their type",
    }


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b


def test_a_state_comes_back_as_it_was(tmp_path):
    save_state(tmp_path, 3, tree())
    step, state = latest_state(tmp_path)
    assert step == 3 and same(tree(), state)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(2, 3))], lr=0.5)
    optimizer.load_state_dict(state["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.1 and same(
        optimizer.state_dict()["state"], tree()["optimizer"]["state"]
    )


def test_the_newest_two_are_kept(tmp_path):
    assert latest_state(tmp_path) is None
    for step in (9, 10, 11):
        save_state(tmp_path, step, {"step": step})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000010", "00000011"]
    assert latest_state(tmp_path) == (11, {"step": 11})
    save_state(tmp_path, 11, {"step": "again"})
    assert latest_state(tmp_path) == (11, {"step": "again"})


def test_views_of_one_storage_are_saved_each(tmp_path):
    whole = torch.arange(6.0)
    save_state(tmp_path, 1, {"left": whole[:3], "right": whole[2:], "across": whole.view(2, 3).T})
    state = latest_state(tmp_path)[1]
    assert state["right"].tolist() == [2, 3, 4, 5] and state["across"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_write_that_fails_keeps_what_was_there(tmp_path, monkeypatch):
    save_state(tmp_path, 1, {"step": 1})

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"00000002.*No space left.*--resume"):
        save_state(tmp_path, 2, {"step": 2})
    assert latest_state(tmp_path) == (1, {"step": 1}) and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors"])
def test_a_damaged_state_is_named(tmp_path, name):
    for step in (1, 2):
        save_state(tmp_path, step, {"step": step, "weights": torch.ones(3)})
    path = tmp_path / "00000002" / name
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(UserError, match=r"00000002.*is damaged.*delete that folder to go on from the one before it\."):
        latest_state(tmp_path)


def test_another_version_is_refused(tmp_path):
    save_state(tmp_path, 1, {"step": 1})
    path = tmp_path / "00000001" / "state.json"
    path.write_text(path.read_text().replace('"contract_version": ', '"contract_version": 9'))
    with pytest.raises(UserError, match="contract version 9"):
        latest_state(tmp_path)


def test_what_cannot_be_saved_is_named_before_writing(tmp_path):
    with pytest.raises(TypeError, match="state/a/0 is object"):
        save_state(tmp_path, 1, {"a": [object()]})
    assert not list(tmp_path.iterdir())


def test_killed_while_writing_there_is_always_a_whole_state(tmp_path):
    """A process that does nothing but write states is killed at ten moments, some of them inside a write."""
    caught, rng, newest, attempt = 0, np.random.default_rng(0), 0, 0
    save_state(tmp_path, 0, {"step": 0, "weights": torch.zeros(300_000)})
    while attempt < 10 or (attempt < 400 and caught < 3):
        attempt += 1
        child = os.fork()
        if child == 0:
            for step in range(newest + 1, 10**6):
                save_state(tmp_path, step, {"step": step, "weights": torch.full((300_000,), float(step))})
        while attempt % 2 and not (tmp_path / f"{newest + 1:08d}").exists():  # however slow the machine is
            time.sleep(0.001)
        time.sleep(rng.uniform(0.01, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        caught += any(path.name.endswith(".writing") for path in tmp_path.iterdir())
        step, state = latest_state(tmp_path)
        assert state["step"] == step >= newest and (state["weights"] == step).all()
        newest = step
    assert caught >= 3 and newest >= 3


@pytest.mark.parametrize("moment", range(4))
def test_killed_while_a_state_is_replaced_one_of_both_is_whole(tmp_path, monkeypatch, moment):
    """A process ends at each rename and within each removal; so does a fleet's learner that saves twice at one step."""

    left, replace, rmtree = [moment], os.replace, shutil.rmtree

    def dies() -> bool:
        left[0] -= 1
        return left[0] == -1

    def half_removed(path, ignore_errors):
        if os.path.isdir(path):
            if dies():
                os.remove(os.path.join(path, "state.json"))
                raise Killed
            rmtree(path)

    def moved(path, target):
        if dies():
            raise Killed
        replace(path, target)

    save_state(tmp_path, 7, {"which": "first"})
    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(shutil, "rmtree", half_removed)
        patch.setattr(os, "replace", moved)
        save_state(tmp_path, 7, {"which": "second"})
    step, state = latest_state(tmp_path)
    assert step == 7 and state["which"] == ("first" if moment < 2 else "second")
    for which in ("third", "fourth"):
        save_state(tmp_path, 7, {"which": which})
        assert latest_state(tmp_path) == (7, {"which": which})
    assert [path.name for path in tmp_path.iterdir()] == ["00000007"]


def test_who_may_read_a_states_numbers_may_read_its_tensors(tmp_path):
    save_state(tmp_path, 1, {"weights": torch.ones(2)})
    numbers, tensors = ((tmp_path / "00000001" / name).stat().st_mode for name in ("state.json", "tensors.safetensors"))
    assert tensors == numbers and tensors & 0o044 == 0o044


# -- of several processes ----------------------------------------------------------------------------------------------


def state_of(step: int, rank: int) -> dict[str, Any]:
    """Weights that both have, of which some look alike, and the source of each; the second also has a buffer."""
    learner = {"weights": torch.full((4,), float(step)), "moments": torch.full((4,), float(step)), "count": step}
    own = {"buffer": torch.arange(3.0)} if rank else {}
    return {"learner": learner, "source": {"noise": torch.tensor([10.0 * step + rank]), "name": f"{rank}"}, **own}


def in_both(do: Callable[[TwoProcesses], Any]) -> list[Any]:
    """``do`` in two processes, which are threads."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(do, TwoProcesses.pair()))


def test_each_process_gets_its_own_state_and_the_common_one(tmp_path: Path) -> None:
    in_both(lambda group: save_shared(tmp_path, 7, state_of(7, group.rank), group))
    found = in_both(lambda group: latest_shared(tmp_path, group))
    for rank in (0, 1):
        assert found[rank][0] == 7 and same(found[rank][1], state_of(7, rank))
    with safe_open(tmp_path / "process-1" / "state" / "00000007" / "tensors.safetensors", "pt") as file:
        assert set(file.keys()) == {"state/source/noise", "state/buffer"}


def test_killed_before_the_last_file_both_go_on_from_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process has written the new step, the first has not; two more times, so that none is cleared away."""
    real = checkpoint.write_state

    def killed(folder: Path, *given: Any) -> None:
        if folder == tmp_path / "state":
            raise KeyboardInterrupt
        real(folder, *given)

    for step in (1, 2):
        in_both(lambda group, step=step: save_shared(tmp_path, step, state_of(step, group.rank), group))
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "write_state", killed)
            patch.setattr(checkpoint, "barrier", lambda group: None)
            with pytest.raises(KeyboardInterrupt):
                in_both(lambda group: save_shared(tmp_path, 3, state_of(3, group.rank), group))
        assert (tmp_path / "process-1" / "state" / "00000003").exists()
        found = in_both(lambda group: latest_shared(tmp_path, group))
        assert [step for step, _ in found] == [2, 2] and same(found[1][1], state_of(2, 1))
    in_both(lambda group: save_shared(tmp_path, 3, state_of(3, group.rank), group))
    assert [step for step, _ in in_both(lambda group: latest_shared(tmp_path, group))] == [3, 3]


def test_nothing_saved_is_none_and_a_lost_part_is_said(tmp_path: Path) -> None:
    assert in_both(lambda group: latest_shared(tmp_path, group)) == [None, None]
    in_both(lambda group: save_shared(tmp_path, -1, state_of(0, group.rank), group))
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
