"""World models: refused training data, refused environments, and the batches of training."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.world_models.pushing import played
from tests.world_models.small_models import SMALL, model, spec
from vla_rl.contract.errors import UserError
from vla_rl.experience.demonstrations import Trajectories
from vla_rl.training.fit import FitConfig
from vla_rl.training.world_model import (
    Coevolution,
    CoevolutionConfig,
    Signals,
    WorldModelFit,
    as_predicted,
    fit_world_model,
    imagine_along,
    load_world_model,
    require_same_env,
    save_world_model,
    statistics,
)
from world_models.config import WorldModelConfig
from world_models.model import WorldModel

FIT = WorldModelFit(*[FitConfig(steps=1, batch=2)] * 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("worlds") / "world"
    save_world_model(model(), path)
    return path


TABLE = spec()
FRONT, STATE, ACTION = TABLE.images["front"], TABLE.state, TABLE.action


def test_what_it_does_not_depend_on_may_differ(folder):
    made, _ = load_world_model(folder, replace(spec(), name="elsewhere", time_limit=99, max_chunk=2, can_snapshot=True))
    assert made.spec == spec() and not made.training


@pytest.mark.parametrize(
    ("entry", "value", "error"),
    [
        ("spec", None, "has no 'spec'"),
        ("config", None, "has no 'config'"),
        ("world_model", "builtins:print", "names the class 'builtins:print'"),
        ("world_model", "EnvSpec", "is no world model"),
        ("world_model", "Nothing", "is no class of vla-rl"),
    ],
)
def test_a_damaged_or_foreign_folder_is_refused(folder, tmp_path, entry, value, error):
    saved = json.loads((folder / "config.json").read_text())
    saved = {name: item for name, item in saved.items() if name != entry} | ({entry: value} if value else {})
    (tmp_path / "config.json").write_text(json.dumps(saved))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match=error):
        load_world_model(tmp_path)


def test_weights_of_another_size_are_refused(folder, tmp_path):
    save_world_model(model(pose_maps=4), tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match=r"does not fit the model that its config\.json describes"):
        load_world_model(tmp_path / "other")


@pytest.mark.parametrize(("won", "which"), [(True, "all"), (False, "none")])
def test_episodes_that_all_ended_alike_teach_no_outcome(won, which):
    trajectories = played(30, seed=1)
    one_outcome = trajectories.select(np.flatnonzero(trajectories.outcomes == won))
    assert 0 < one_outcome.count < trajectories.count
    made = model()
    before = [item.clone() for item in made.parameters()]
    with pytest.raises(
        UserError, match=f"{which} of {one_outcome.count} episodes succeeded.*add episodes of the other kind"
    ):
        fit_world_model(made, one_outcome, FIT, torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(before, made.parameters(), strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda it: {"images": {"side": it.images["front"]}},
        lambda it: {"images": {"front": it.images["front"], "side": it.images["front"]}},
        lambda it: {"images": {"front": it.images["front"][:, :, :8]}},
        lambda it: {"state": it.state[:, :2]},
        lambda it: {"action": it.action[:, :1]},
        lambda it: {"task": it.task + 1},
        lambda it: {"task": it.task - 1},
    ],
    ids=["camera", "cameras", "size", "state", "action", "task", "unknown task"],
)
def test_episodes_of_another_environment_are_refused(change):
    trajectories = played(6, seed=1)
    require_same_env(spec(), trajectories)
    with pytest.raises(UserError, match="a world model of it cannot learn from them; record"):
        fit_world_model(model(), replace(trajectories, **change(trajectories)), FIT, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("cameras", [("front",), ("side", "front")])
def test_imagined_episodes_are_as_long_as_the_recorded_ones(monkeypatch, cameras):
    """The model's pictures become brighter by one in every call; a call has the imagined past and recorded states."""
    trajectories, made = played(8, seed=1), model(cameras)
    front = trajectories.images["front"]
    dark = {name: front // 2 if name == "front" else front[:, ::-1] // 4 for name in cameras}
    trajectories = replace(
        trajectories, images=dark, state=np.arange(trajectories.state.size, dtype=np.float32).reshape(-1, 3)
    )
    asked = []

    def brighter(batch, generator):
        asked.append(batch)
        return batch["pictures"][:, -1] + 1

    monkeypatch.setattr(made, "predict_along", brighter)
    imagined, ends = imagine_along(made, trajectories, torch.Generator().manual_seed(0))
    assert len(asked) > 1
    for batch in asked:
        course = (batch["state"][:, :1, 0] / 3).long() + torch.arange(1 + made.config.frames)
        assert torch.equal(batch["state"], torch.from_numpy(trajectories.state)[course])
        assert torch.equal(batch["actions"], torch.from_numpy(trajectories.action)[course[:, :-1]])
    offsets = set()
    for begin, end in trajectories.spans():
        moments = np.sort(ends[(ends >= begin) & (ends < end)])
        offsets.add(int(moments[0] - begin))
        assert (np.diff(moments) == made.config.frames).all() and moments[-1] + made.config.frames >= end
        others = np.setdiff1d(np.arange(begin, end), moments)
        for camera, recorded in trajectories.images.items():
            pictures = imagined.images[camera]
            for depth, moment in enumerate(moments):
                assert (pictures[moment] == recorded[moments[0]] + depth).all()
            assert (pictures[others] == recorded[others]).all()
    assert offsets == set(range(made.config.frames))


def test_half_of_the_training_crops_are_imagined(monkeypatch):
    made, sampled = model(), []
    monkeypatch.setattr(made, "predict_along", lambda batch, generator: torch.full_like(batch["pictures"][:, -1], 255))
    learn = made.mode_classifier_loss
    monkeypatch.setattr(
        made,
        "mode_classifier_loss",
        lambda batch, generator: [sampled.append(batch["pictures"]), learn(batch, generator)][1],
    )
    fit = replace(FIT, mode_classifier=FitConfig(steps=5, batch=32))
    fit_world_model(made, played(30, seed=1), fit, torch.Generator().manual_seed(0))
    imagined = (torch.stack(sampled) == 255).flatten(2).all(2)
    assert not imagined[:, :16].any() and imagined[:, 16:].float().mean() > 0.3


def test_crops_are_sampled_where_the_modes_are_uncertain(monkeypatch):
    """Only one time step is uncertain, recorded and imagined: it gets 9 of 10 crops, the others share the tenth."""
    made, trajectories, sampled = model(), played(30, seed=1), []
    uncertain_step = 5
    monkeypatch.setattr(
        made,
        "mode_uncertainty",
        lambda batch: (batch["state"][:, 0] == torch.from_numpy(trajectories.state[uncertain_step])).all(1).float(),
    )
    learn = made.mode_classifier_loss
    monkeypatch.setattr(
        made,
        "mode_classifier_loss",
        lambda batch, generator: [sampled.append(batch["state"][:, 0]), learn(batch, generator)][1],
    )
    fit_world_model(
        made,
        trajectories,
        replace(FIT, mode_classifier=FitConfig(steps=10, batch=64)),
        torch.Generator().manual_seed(0),
    )
    share = (torch.stack(sampled) == torch.from_numpy(trajectories.state[uncertain_step])).all(-1).float()
    assert abs(share[:, :32].mean() - 0.9) < 0.06


def without_proprioception() -> Trajectories:
    """The episodes of ``pushing`` as a grey camera of 12 x 20 pixels and one in colour see them."""
    seen = played(12, seed=3)
    front = seen.images["front"]
    images = {"front": front, "grey": front[:, :12, :, :1].repeat(2, 2)[:, :, :20]}
    return replace(seen, images=images, state=np.zeros((len(seen.state), 0), np.float32))


def test_cameras_of_two_sizes_without_proprioception_are_learnt():
    seen, table = without_proprioception(), spec()
    images = {"front": table.images["front"], "grey": replace(table.images["front"], shape=(12, 20, 1))}
    given = replace(table, images=images, state=replace(table.state, shape=(0,), low=(), high=()))
    torch.manual_seed(0)
    config = WorldModelConfig(frames=3, backbone=SMALL, robot_crop=0, resolution=(16, 24))
    made, losses = WorldModel(given, config, *statistics(seen)), list[float]()

    def note(step: int, info: dict[str, float]) -> None:
        losses.extend(info.values())

    fit_world_model(made, seen, FIT, torch.Generator().manual_seed(0), note)
    assert losses and np.isfinite(losses).all()
    predicted = as_predicted(made, seen)
    assert {name: item.shape[1:] for name, item in predicted.images.items()} == {
        "front": (16, 24, 3),
        "grey": (16, 24, 3),
    }
    assert predicted.state.shape == (len(seen.state), 1) and not predicted.state.any()
    imagined, _ = imagine_along(made, predicted, torch.Generator().manual_seed(0))
    assert imagined.images["grey"].shape == predicted.images["grey"].shape


def test_the_video_model_is_trained_where_the_robot_is_known(monkeypatch):
    """Pictures that are moved with the robot are among its inputs."""
    seen, made, known = played(12, seed=3), model(), list[bool]()
    loss = made.loss
    monkeypatch.setattr(
        made, "loss", lambda *given: known.append(bool(made.robot_position.weight.any())) or loss(*given)
    )
    fit_world_model(made, seen, FIT, torch.Generator().manual_seed(0))
    assert known == [True]


def test_what_is_of_the_models_size_already_is_seen_as_it_is():
    seen = played(2, seed=3)
    same = as_predicted(model(), seen)
    assert same.images["front"] is seen.images["front"] and same.state is seen.state


# -- real episodes are bought when imagination drifts from reality, from a fixed budget --------------------------------


CALM = Signals(
    imagined=0.6, real=0.55, uncertain=0.1, inverse_dynamics_error=0.2, rollouts=10_000, real_episodes=10_000
)
CONFIG = CoevolutionConfig(budget=250, batch=100, success_gap=0.1, uncertainty_rise=0.05, inverse_dynamics_ratio=1.5)


def test_nothing_is_bought_while_all_signals_are_calm():
    decision = Coevolution(CONFIG, CALM).decide(CALM)
    assert decision.buy == 0 and decision.reasons == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"imagined": 0.68}, "imagined success 68% exceeds real success 55%"),
        ({"real": 0.4}, "imagined success 60% exceeds real success 40%"),
        ({"uncertain": 0.17}, "uncertainty truncates 17% of the rollouts, at first 10%"),
        ({"inverse_dynamics_error": 0.31}, "inverse-dynamics error 0.310, at first 0.200"),
    ],
)
def test_each_sign_alone_buys_and_says_why(change, reason):
    decision = Coevolution(CONFIG, CALM).decide(replace(CALM, **change))
    assert decision.buy == 100 and decision.reasons == (reason,)


def test_a_lower_imagined_success_buys_nothing():
    assert Coevolution(CONFIG, CALM).decide(Signals(0.1, 0.9, 0.0, 0.0, 100, 100)).buy == 0


@pytest.mark.parametrize(("imagined", "rollouts", "bought"), [(0.66, 10_000, 0), (0.72, 128, 0), (0.90, 128, 100)])
def test_a_difference_that_chance_explains_buys_nothing(imagined, rollouts, bought):
    """The gap of ten points is exceeded each time; an interval of the difference lies above it in the last alone."""
    assert Coevolution(CONFIG, CALM).decide(replace(CALM, imagined=imagined, rollouts=rollouts)).buy == bought


@pytest.mark.parametrize(("rate", "real_episodes"), [(0.02, 830), (0.5, 50), (0.95, 830)])
def test_equal_rates_buy_in_at_most_two_of_a_hundred_decisions(rate, real_episodes):
    """Success and uncertainty by chance, 128 rollouts a decision, the default config; forty points are seen."""
    rng, config, decisions = np.random.default_rng(1), CoevolutionConfig(budget=100), 3000

    def signals(real: float) -> Signals:
        imagined, uncertain = rng.binomial(128, rate, 2) / 128
        played = rng.binomial(real_episodes, real) / real_episodes
        return Signals(float(imagined), float(played), float(uncertain), 0.2, 128, real_episodes)

    bought = [Coevolution(config, signals(rate)).decide(signals(rate)).buy for _ in range(decisions)]
    assert np.mean(np.array(bought) > 0) <= 0.02
    if rate >= 0.5:
        noticed = [Coevolution(config, signals(rate)).decide(signals(rate - 0.4)).buy for _ in range(300)]
        assert np.mean(np.array(noticed) > 0) >= 0.9


def test_one_false_alarm_does_not_spend_the_budget():
    config = CoevolutionConfig(budget=100)
    first = Coevolution(config, CALM).decide(replace(CALM, uncertain=0.5)).buy
    assert 0 < first <= config.budget / 2


def test_one_never_played_alone_is_not_compared_with_reality():
    unknown = replace(CALM, real=None, real_episodes=0)
    assert Coevolution(CONFIG, unknown).decide(replace(unknown, imagined=1.0)).reasons == ()
    assert Coevolution(CONFIG, unknown).decide(replace(unknown, uncertain=0.5)).buy == 100


def test_the_budget_is_never_exceeded_and_reasons_stay():
    state, worse, bought = Coevolution(CONFIG, CALM), replace(CALM, uncertain=0.5), []
    for _ in range(5):
        decision = state.decide(worse)
        bought.append(decision.buy)
        assert decision.reasons
        state = state.renewed(CALM, decision.buy)
    assert bought == [100, 100, 50, 0, 0] and state.spent == 250


def test_bought_episodes_set_the_new_baseline():
    worse = replace(CALM, uncertain=0.5, inverse_dynamics_error=0.4)
    state = Coevolution(CONFIG, CALM).renewed(replace(worse, real=0.6), 100)
    assert state.decide(worse).reasons == ()


def test_numbers_that_buy_nothing_sensible_are_refused():
    for numbers in ({"budget": -1}, {"batch": 0}, {"every": 0}):
        with pytest.raises(UserError, match="cannot be spent"):
            CoevolutionConfig(**numbers)
    with pytest.raises(UserError, match="lets chance buy"):
        CoevolutionConfig(z=0.0)
