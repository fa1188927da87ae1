"""``vla-rl imagine rank``: policies that nobody has played for real, in the world model of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.recipes.imagine.runs import CALM, push, run_folder
from vla_rl.cli import main
from vla_rl.contract.env import Observation
from vla_rl.contract.errors import UserError
from vla_rl.evaluation.ranking import Played, expected_searches, rank
from vla_rl.policies.function import FunctionPolicy
from vla_rl.recipes.imagine.agreement import Rank, rank_policies, tried
from vla_rl.recipes.imagine.calibrated_model import recorded_initial_states, replay_trajectories
from vla_rl.recipes.imagine.recipe import SavedRun
from world_models.config import Limits
from world_models.env import ImaginedEnv

# In training; where policies are ranked, episodes are as long as the simulator's.
SHORT = replace(CALM, horizon=6, deadline=6, resamples=0)
STARTS = 5


def pull(obs: Observation) -> np.ndarray:
    """[E,2,2]: the opposite of :func:`push`."""
    return -push(obs)


def still(obs: Observation) -> np.ndarray:
    """[E,1,2]: far outside of what was recorded, which is between -0.5 and 0.5."""
    return np.full((len(obs.state), 1, 2), 0.5)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SavedRun:
    """About half of ten imagined rollouts succeed."""
    made = SavedRun.load(run_folder(tmp_path_factory.mktemp("runs") / "run", SHORT))
    found = replay_trajectories(made.calibrated.model, made.held_out, SHORT)
    done = float(np.median(np.nanmax(found.success, 1)))
    imagination = replace(made.calibrated.imagination, success_threshold=done)
    replace(made.calibrated, limits=Limits((-1.0,)), imagination=imagination).save(
        made.folder / "checkpoints" / "world"
    )
    return SavedRun.load(made.folder)


@pytest.fixture(scope="module")
def policies(run, tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("policies")
    for function in (push, pull, still):
        name = f"{function.__module__}:{function.__name__}"
        FunctionPolicy(run.calibrated.model.spec, function, name).save_pretrained(folder / function.__name__)
    return [str(folder / name) for name in ("push", "pull", "still")]


def by_hand(run: SavedRun, function, steps: int | None = None) -> tuple[np.ndarray, float]:
    """Which of the rollouts succeed, each alone; and the share of their decisions that leave what was tried."""
    steps = steps or run.calibrated.model.spec.time_limit
    found, states, chunks = [], [], []
    for episode in range(STARTS):
        config = replace(run.calibrated.imagination, keyframe_share=0.0, resamples=0, horizon=steps, deadline=None)
        pool = recorded_initial_states(run.calibrated.model, run.not_learnt_from())
        env = ImaginedEnv(run.calibrated.model, pool, 1, None, config)
        obs, success = env.reset(np.zeros(1, int), [episode]), False
        while True:
            states.append(obs.state[0].copy())
            chunks.append(function(obs)[0].astype(np.float32))
            step = env.step(chunks[-1][None])
            obs, success = step.obs, bool(step.success[0])
            if step.terminated[0] or step.truncated[0]:
                break
        found.append(success)
    left = tried(run.not_learnt_from(), len(chunks[0])).left(np.stack(states), np.stack(chunks))
    return np.array(found), float(left.mean())


@pytest.mark.full
def test_it_is_the_ranking_of_what_they_do_in_the_world_model(run, policies, capsys, monkeypatch):
    monkeypatch.setattr("vla_rl.recipes.imagine.agreement.expected_searches", partial(expected_searches, count=1))
    known = ["--real", f"{policies[0]}=9/12", "--before-deployment", "--starts", str(STARTS)]
    main(["imagine", "rank", str(run.folder), *policies, *known])
    found = json.loads((run.folder / "rank.json").read_text())
    played = {name: by_hand(run, function) for name, function in zip(policies, (push, pull, still), strict=True)}
    assert 0 < sum(one.sum() for one, _ in played.values()) < 3 * STARTS
    rows = {row["name"]: row for row in found["policies"]}
    for name, (one, left) in played.items():
        assert rows[name]["imagined"]["success"] == one.mean() and rows[name]["imagined"]["episodes"] == STARTS
        assert rows[name]["outside"] == left
    real = {policies[0]: (9, 12)}
    expected = rank([Played(name, one, real.get(name, (0, 0))) for name, (one, _) in played.items()])
    assert [row["name"] for row in found["policies"]] == [one.name for one in expected.estimates]
    assert [row["success"] for row in found["policies"]] == [one.success for one in expected.estimates]
    assert [pair["probability"] for pair in found["pairs"]] == [one.probability for one in expected.pairs]
    assert rows[policies[0]]["real"] == [9, 12] and found["starts"] == STARTS
    assert found["steps"] == run.calibrated.model.spec.time_limit > SHORT.horizon
    assert len({left for _, left in played.values()}) > 1
    assert 0 <= found["search"]["informed"] <= found["search"]["at_most"] >= found["search"]["alone"]
    page, said = (run.folder / "rank.html").read_text(), capsys.readouterr().err
    assert "9 of 12" in page and "leaves what was tried" in page and "without imagined rollouts" in page
    assert all(name in "".join(said.split()) for name in policies) and "of 3 pairs are decided" in said


def test_tried_are_the_recorded_chunks_at_every_step(run):
    found = tried(run.not_learnt_from(), 2)
    recorded = run.not_learnt_from()
    steps = [step for begin, end in recorded.spans() for step in range(begin, end - 2)]  # the last entry has no action
    expected = [[*recorded.state[i], *recorded.action[i], *recorded.action[i + 1]] for i in steps]
    np.testing.assert_allclose(found.decisions * found.std + found.mean, expected, atol=1e-5)
    with pytest.raises(UserError, match="no recorded episode is longer than 500 actions"):
        tried(run.not_learnt_from(), 500)


@pytest.mark.full
def test_fewer_and_shorter_rollouts_can_be_asked_for(run, policies, tmp_path):
    rank_policies(run, policies[:2], Rank(steps=3, starts=STARTS, out=str(tmp_path)))
    found = json.loads((tmp_path / "rank.json").read_text())
    assert found["steps"] == 3 and found["starts"] == STARTS
    for row in found["policies"]:
        function = dict(zip(policies, (push, pull, still), strict=True))[row["name"]]
        assert row["imagined"]["success"] == by_hand(run, function, 3)[0].mean()


def test_nonsense_is_refused(run, policies, complaint):
    command = ("imagine", "rank", str(run.folder), *policies)
    assert "no two policies" in complaint(*command[:4])
    assert "holds out 12 episodes" in complaint(*command, "--starts", "13")
    assert "SUCCESSES/EPISODES" in complaint(*command, "--real", f"{policies[0]}=13/12")
    assert "which is not ranked" in complaint(*command, "--real", "other=1/12")
    assert "imagine rank needs RUN" in complaint("imagine", "rank")
