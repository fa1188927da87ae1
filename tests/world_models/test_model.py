"""A world model learns a toy environment with known dynamics: pictures, state, outcome, uncertainty and actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.world_models.pushing import played
from tests.world_models.small_models import model as small_model
from tests.world_models.small_models import spec
from vla_rl.contract.errors import UserError
from vla_rl.experience.demonstrations import Trajectories, make_sequences, sequence_batch
from vla_rl.training.fit import FitConfig
from vla_rl.training.world_model import WorldModelFit, as_predicted, fit_world_model, statistics
from world_models.backbones.unet import UNetConfig
from world_models.config import WorldModelConfig
from world_models.model import WorldModel, revision
from world_models.robot import disagreement, sample_modes
from world_models.types import Context, Future, to_unit_range

FRAMES = 3
UNET = UNetConfig(2, width=16, deep=16, depth=1, heads=2, embedding=64)
FIT = WorldModelFit(
    *(FitConfig(*numbers) for numbers in ((300, 128, 4e-3), (100, 128, 4e-3), (300, 32, 4e-3), (200, 64, 2e-3)))
)
# The robot is learnt, the pictures hardly: what is computed from them can be seen all the same.
BRIEF = FitConfig(10, 16, 4e-3)
ROBOT_ONLY = WorldModelFit(FitConfig(200, 128, 4e-3), BRIEF, BRIEF, BRIEF)


@pytest.fixture(scope="module")
def learnt() -> WorldModel:
    return fitted(ROBOT_ONLY, episodes=100)


@pytest.fixture(scope="module")
def well_learnt() -> WorldModel:
    return fitted(FIT)


def fitted(fit: WorldModelFit, backbone: Any = UNET, episodes: int = 300) -> WorldModel:
    torch.manual_seed(0)
    trajectories, config = played(episodes, seed=1), WorldModelConfig(FRAMES, FRAMES, backbone=backbone)
    made = WorldModel(spec(), config, *statistics(trajectories))
    fit_world_model(made, trajectories, fit, torch.Generator().manual_seed(1))
    return made.eval()


def windows(made: WorldModel, trajectories: Trajectories) -> dict[str, torch.Tensor]:
    """Those whose first call is whole."""
    trajectories = as_predicted(made, trajectories)
    table = make_sequences(trajectories, made.config.frames, made.config.context_frames)
    whole = np.flatnonzero(table["count"] >= made.config.frames)
    return {name: torch.from_numpy(item) for name, item in sequence_batch(trajectories, table, whole).items()}


@pytest.fixture(scope="module")
def held_out(learnt) -> dict[str, torch.Tensor]:
    return windows(learnt, played(70, seed=2))


def calls_of(module: torch.nn.Module, run: Callable[[], Any]) -> tuple[list[tuple[Any, Any]], Any]:
    """The inputs and the output of every call of ``module`` while ``run()`` runs, and what that returns."""
    seen: list[tuple[Any, Any]] = []
    hook = module.register_forward_hook(lambda module, given, made: seen.append((given, made)))
    found = run()
    hook.remove()
    return seen, found


def present(model: WorldModel, batch: dict[str, torch.Tensor]) -> Context:
    return Context(batch["pictures"][:, : 1 + model.config.context_frames], batch["state"][:, 0], batch["task"])


def predicted(model: WorldModel, batch: dict[str, torch.Tensor], known: int = FRAMES) -> Future:
    shape = (len(batch["task"]), model.config.pictures, *model.video.latent)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    return model.predict(present(model, batch), batch["actions"][:, :FRAMES], torch.full(shape[:1], known), noise)


def distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one.float() - other.float()).square().flatten(1).mean(1)


@pytest.mark.full
def test_it_predicts_better_than_that_nothing_changes(well_learnt, held_out):
    """Twice, at every number of known actions."""
    for known in range(1, FRAMES + 1):
        truth = held_out["pictures"][:, well_learnt.config.context_frames + known]
        guess = predicted(well_learnt, held_out, known).pictures[:, known - 1]
        still = held_out["pictures"][:, well_learnt.config.context_frames]
        assert distance(guess, truth).mean() < 0.5 * distance(still, truth).mean()


@pytest.mark.full
def test_the_robots_state_is_predicted(learnt, held_out):
    truth, guess = held_out["state"][:, FRAMES], predicted(learnt, held_out).state[:, -1]
    assert (guess - truth).abs().mean() < 0.3 * (held_out["state"][:, 0] - truth)[:, :2].abs().mean()


@pytest.mark.full
def test_success_is_reported_under_the_given_instruction(well_learnt, held_out):
    done = held_out["outcome"][:, FRAMES - 1, 0] > 0.5
    predicted_success = predicted(well_learnt, held_out).outcome[:, 0]
    assert done.sum() > 5 and (predicted_success[done][:, None] > predicted_success[~done]).float().mean() > 0.9
    other = predicted(well_learnt, dict(held_out, task=1 - held_out["task"])).outcome[:, 0]
    assert (other[done] < predicted_success[done]).float().mean() > 0.9 and other[done].mean() < 0.2


@pytest.mark.full
def test_what_will_be_done_is_reported_before_it_is(well_learnt, held_out):
    will, done = held_out["outcome"][:, FRAMES - 1, 2] > 0.5, held_out["outcome"][:, FRAMES - 1, 0] > 0.5
    predicted_success = predicted(well_learnt, held_out).outcome[:, 2]
    assert (predicted_success[will & ~done][:, None] > predicted_success[~will]).float().mean() > 0.7


def test_uncertainty_is_how_far_apart_the_robot_may_be(learnt, held_out):
    """At the last known control step; without the picture, by the odds of the state dynamics."""
    ((given, odds),), future = calls_of(learnt.mode_classifier, lambda: predicted(learnt, held_out, known=2))
    torch.testing.assert_close(future.uncertainty, disagreement(given[4].modes[:, :, 1], odds))
    assert (future.uncertainty > 0).all()
    batch = {"state": held_out["state"][:, : 1 + FRAMES], "actions": held_out["actions"][:, :FRAMES]}
    batch["count"] = torch.full((len(batch["state"]),), 2)
    ((_, (modes, odds)),), uncertainty = calls_of(learnt.state_dynamics, lambda: learnt.mode_uncertainty(batch))
    torch.testing.assert_close(uncertainty, disagreement(modes[:, :, 1], odds))


@pytest.mark.full
def test_actions_that_were_not_executed_have_a_larger_error(well_learnt, held_out):
    before, after = (held_out["pictures"][:, well_learnt.config.context_frames + i] for i in (0, FRAMES))
    right = held_out["actions"][:, :FRAMES]
    wrong = right.flip(0)
    for shown in (after, predicted(well_learnt, held_out).pictures[:, -1]):
        errors = [well_learnt.inverse_dynamics_error(before, shown, actions) for actions in (right, wrong)]
        assert (errors[1] > errors[0]).float().mean() > 0.8


def test_actions_beyond_the_known_ones_change_nothing(learnt, held_out):
    other = dict(held_out, actions=held_out["actions"].clone())
    other["actions"][:, 2:] = 0.3
    one, two = predicted(learnt, held_out, 2), predicted(learnt, other, 2)
    assert torch.equal(one.pictures, two.pictures) and torch.equal(one.outcome, two.outcome)
    assert torch.equal(one.state[:, :2], two.state[:, :2])


def test_a_step_keeps_the_noise_of_its_level(learnt, held_out):
    """The input of the second of two steps is the first estimate and half of the remaining noise."""
    (first, second), _ = calls_of(learnt.video, lambda: predicted(learnt, held_out))
    torch.testing.assert_close(second[0][0], 0.5 * (first[0][0] + first[1].clean))


def test_the_predicted_state_is_a_mode_with_its_probability(learnt, held_out):
    """In every entry one of the modes, as often as its odds say, and never their mean."""
    inside, future = calls_of(learnt.mode_classifier, lambda: predicted(learnt, held_out))
    ((given, _), _), _ = calls_of(learnt.video, lambda: predicted(learnt, held_out))
    state, begin = learnt.normalize(future.state), learnt.spec.action_dim + 1
    torch.testing.assert_close(given[3].vector[..., begin : begin + state.shape[-1]], state)
    modes, odds = inside[0][0][4].modes, inside[0][1]
    far = (modes - state[:, None]).abs().amax(2)
    assert (far.amin(1) < 1e-5).all()
    chosen = torch.nn.functional.one_hot(far.argmin(1), far.shape[1]).float().mean(0).T
    torch.testing.assert_close(chosen, odds.exp().mean(0), atol=0.1, rtol=0.0)


def test_every_entry_of_the_state_has_random_numbers_of_its_own(learnt, held_out, monkeypatch):
    chances: list[torch.Tensor] = []

    def note(modes: torch.Tensor, odds: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
        chances.append(chance)
        return sample_modes(modes, odds, chance)

    monkeypatch.setattr("world_models.model.sample_modes", note)
    predicted(learnt, held_out)
    assert chances[0].shape == held_out["state"][:, 0].shape
    assert (chances[0][:, 1:] != chances[0][:, :1]).all() and (chances[0][1:] != chances[0][:1]).all()


def test_the_same_noise_gives_the_same_frames(learnt, held_out):
    frames = predicted(learnt, held_out).pictures
    assert frames.dtype == torch.uint8 and frames.shape[1:] == (FRAMES, *learnt.picture)
    assert torch.equal(frames, predicted(learnt, held_out).pictures)


def test_the_registration_is_fitted_once(learnt, held_out):
    """The classifier is trained on top of the registration, which must not change afterwards."""
    before = learnt.robot_position.weight.clone()
    learnt.fit_registration({"state": held_out["state"][:50, 0], "pictures": held_out["pictures"][:50, -1]})
    assert before.abs().max() > 0.1 and torch.equal(learnt.robot_position.weight, before)


@pytest.mark.parametrize("known", [2, FRAMES])
def test_the_video_model_sees_the_latest_picture_moved(learnt, held_out, known):
    """To where the robot is predicted to be at every picture, or was recorded to be in training."""
    calls, future = calls_of(learnt.video, lambda: predicted(learnt, held_out, known))
    frames = calls[0][0][2].frames
    latest = to_unit_range(held_out["pictures"][:, learnt.config.context_frames])
    before = learnt.normalize(held_out["state"][:, 0])
    for slot in range(FRAMES):
        after = learnt.normalize(future.state[:, min(slot, known - 1)])
        moved = learnt.robot_position.moved(latest, before, after[:, None])
        torch.testing.assert_close(frames[:, 1 + slot], learnt.video.encode(moved)[:, 0])
    torch.testing.assert_close(frames[:, -1], learnt.video.encode(latest))


def test_without_the_prior_only_recorded_pictures_are_seen(held_out):
    made = small_model(robot_crop=0)
    made.fit_registration({"state": held_out["state"][:50, 0], "pictures": held_out["pictures"][:50, -1]})
    assert not made.robot_position.weight.any()
    calls, _ = calls_of(made.video, lambda: predicted(made, held_out))
    shown = to_unit_range(held_out["pictures"][:, : 1 + made.config.context_frames])
    assert torch.equal(calls[0][0][2].frames, made.video.encode(shown))


def test_uncertainty_of_pictures_is_what_the_last_step_revises(held_out):
    """Of the picture at the last known action."""
    made = small_model(uncertainty="pictures", frames=FRAMES, pictures=FRAMES)
    (first, second), future = calls_of(made.video, lambda: predicted(made, held_out, known=2))
    torch.testing.assert_close(future.uncertainty, revision(first[1].clean[:, 1], second[1].clean[:, 1]))
    assert (future.uncertainty > 0).all()
    with pytest.raises(UserError, match="1 denoising step revises no picture"):
        small_model(uncertainty="pictures", denoising_steps=1)
