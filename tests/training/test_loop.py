"""The loop around an on-policy learner: what it validates, keeps, restores and reports."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vla_rl.evaluation.stats import Rate
from vla_rl.training.loop import BestWeights, Hook, Loop, LoopConfig, PolicyStore


class Fake:
    """Source, learner and policy in one: its only weight counts updates, and it notes the order of all calls."""

    def __init__(self, rates):
        self.parameters = {"w": nn.Parameter(torch.zeros(2))}
        self.lr, self.version = 1.0, 0
        self.rates, self.calls = iter(rates), []
        self.weights_at = []

    def next(self):
        self.calls.append("next")
        return SimpleNamespace(info={"env/steps": 10.0}, spans={})

    def update(self, rollout):
        self.calls.append("update")
        with torch.no_grad():
            self.parameters["w"].add_(1.0)
        return {"kl": 0.5}

    def state_dict(self):
        return {"w": self.parameters["w"].detach().clone(), "rate": self.lr}

    def load_state_dict(self, state):
        with torch.no_grad():
            self.parameters["w"].copy_(state["w"])
        self.lr = state["rate"]

    def trainable(self):
        return self.parameters

    def validate(self):
        self.calls.append("validate")
        self.weights_at.append(self.parameters["w"][0].item())
        return Rate(next(self.rates), 0.1, 0.9, 100)


def run(rates, kind=Fake, validate=True, **config):
    fake, reports, kept = kind(rates), {}, []
    loop = Loop(
        fake,
        fake,
        PolicyStore(fake),
        fake.validate if validate else None,
        replace(LoopConfig(iterations=4, validate_every=1), **config),
        on_best=lambda iteration: kept.append((iteration, fake.parameters["w"][0].item())),
        report=lambda iteration, metrics: reports.update({iteration: metrics}),
    )
    best = loop.run()
    return SimpleNamespace(fake=fake, best=best, reports=reports, kept=kept, final=fake.parameters["w"].tolist())


def test_the_best_validated_weights_are_kept_and_returned():
    found = run([0.2, 0.5, 0.7, 0.6, 0.65])
    assert (found.best.score, found.best.iteration) == (0.7, 2) and found.final == [2.0, 2.0]
    assert found.kept == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert found.fake.lr == 1.0  # nothing collapsed


@pytest.mark.parametrize(
    ("rates", "best"),
    [([0.5, 0.5, 0.4, 0.5, 0.3], 3), ([0.2, 0.8, 0.66, 0.7, 0.66], 1)],
    ids=["of equals the later one", "a slightly worse one changes nothing"],
)
def test_without_a_collapse_it_goes_on_from_the_newest_weights(rates, best):
    found = run(rates, collapse=0.21)
    assert found.best.iteration == best and found.final == [best, best]
    assert found.fake.weights_at == [0, 1, 2, 3, 4] and found.fake.lr == 1.0


def test_without_validation_the_last_weights_are_kept():
    found = run([], validate=False, iterations=3)
    assert found.best.iteration == 3 and found.kept == [(3, 3.0)] and found.final == [3.0, 3.0]
    assert sorted(found.reports) == [0, 1, 2, 3] and not any("eval/score" in it for it in found.reports.values())


@pytest.mark.parametrize(
    ("config", "validated"),
    [
        ({"iterations": 0}, [0]),
        ({"iterations": 5, "validate_every": 0}, [0, 5]),
        ({"iterations": 100, "validate_every": 2, "env_steps": 25}, [0, 2, 3]),
        ({"iterations": 8, "validate_every": 100, "validate_steps": 25}, [0, 3, 6, 8]),
        ({"iterations": 8, "validate_every": 4, "validate_steps": 25}, [0, 3, 4, 7, 8]),
    ],
)
def test_validation_comes_when_it_is_due(config, validated):
    """After so many iterations, or actions since the last one (10 an iteration), before all of them and after."""
    found = run([0.1] * 9, **config)
    assert [i for i, metrics in found.reports.items() if "eval/score" in metrics] == validated
    assert max(found.reports) == validated[-1] == found.reports[validated[-1]]["env/steps_total"] / 10


def test_a_collapse_goes_back_to_the_best_weights_and_slows_down():
    found = run([0.2, 0.8, 0.6, 0.7, 0.66], collapse=0.15)
    assert found.fake.weights_at == [0, 1, 2, 2, 3]  # back to 1 after the third validation
    assert found.fake.lr == 0.5 and found.final == [1.0, 1.0]
    assert [found.reports[i]["eval/collapsed"] for i in range(5)] == [0, 0, 1, 0, 0]
    assert found.fake.version == 6  # restored weights are published too, and the best ones at the end


def test_it_collects_learns_and_publishes_in_turn():
    found = run([0.1] * 4, iterations=5, validate_every=2)
    once = ["next", "update"]
    assert found.fake.calls == ["validate", *2 * once, "validate", *2 * once, "validate", *once, "validate"]
    assert found.fake.version == 6
    assert [("eval/score" in found.reports[i]) for i in range(6)] == [True, False, True, False, True, True]


class Renewing(Hook):
    """The environment changes before the third of four iterations."""

    def __init__(self, fake):
        self.fake, self.asked_at = fake, []

    def before_iteration(self, iteration: int) -> bool:
        self.asked_at.append((iteration, self.fake.parameters["w"][0].item()))
        return iteration == 2


def test_the_best_weights_are_validated_again_in_a_changed_world():
    """Before the third iteration; the weights that were best in the old environment score 0.1 in the new one."""
    fake = Fake([0.2, 0.8, 0.5, 0.1, 0.3, 0.2])
    hook, config = Renewing(fake), LoopConfig(4, 1, collapse=1.0)
    best = Loop(fake, fake, PolicyStore(fake), fake.validate, config, hook=hook).run()
    assert fake.weights_at == [0.0, 1.0, 2.0, 1.0, 3.0, 4.0]
    assert hook.asked_at == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
    assert (best.score, best.iteration) == (0.3, 3) and fake.parameters["w"].tolist() == [3.0, 3.0]


def test_a_resumed_run_validates_at_the_same_actions():
    """Validation is due 25 actions after the last one, which was before the run stopped."""
    undisturbed = run([0.1] * 9, iterations=8, validate_every=0, validate_steps=25)
    config, states, reports = LoopConfig(8, 0, validate_steps=25), [], {}
    fake = Fake([0.1] * 9)
    loop = Loop(fake, fake, PolicyStore(fake), fake.validate, config)
    loop.save = lambda iteration: states.append(loop.state_dict())
    loop.run()
    resumed = Loop(fake, fake, PolicyStore(fake), lambda: Rate(0.1, 0.0, 1.0, 9), config)
    resumed.report = lambda i, metrics: reports.update({i: metrics})
    resumed.load_state_dict(states[5])
    resumed.run()
    for i in (6, 7, 8):
        assert ("eval/score" in reports[i]) == ("eval/score" in undisturbed.reports[i]) == (i in (6, 8))


def test_reports_hold_everything_and_count_all_steps():
    found = run([0.2, 0.5, 0.7, 0.6, 0.65])
    assert [found.reports[i]["env/steps_total"] for i in range(5)] == [0, 10, 20, 30, 40]
    assert {"kl", "env/steps", "time/learn_s", "eval/score", "eval/score_low", "eval/score_high"} <= found.reports[
        3
    ].keys()
    assert found.reports[3]["eval/score"] == 0.6 and found.reports[3]["eval/score_high"] == 0.9


def test_kept_weights_are_copies():
    parameter = {"w": nn.Parameter(torch.ones(2))}
    best = BestWeights()
    assert best.offer(0.5, 1, parameter) and not best.offer(0.4, 2, parameter)
    with torch.no_grad():
        parameter["w"].mul_(7)
    best.restore(parameter)
    assert parameter["w"].tolist() == [1, 1] and best.iteration == 1


def test_publishing_raises_the_version_that_decisions_carry():
    fake = Fake([])
    store = PolicyStore(fake)
    assert fake.version == 0 and store.publish(fake.parameters) == 1 and fake.version == 1


def test_a_loop_goes_on_with_its_best_weights_and_its_counters():
    """The second half of a run, in a loop of its own, does what the second half of the whole run does."""
    rates = [0.2, 0.8, 0.5, 0.7, 0.6]
    whole = run(rates, collapse=0.15)
    halves, states = [], []
    for part, iterations in ((rates[:3], 2), (rates[3:], 4)):
        fake = Fake(part)
        config = LoopConfig(iterations=iterations, validate_every=1, collapse=0.15)
        reports = halves[-1].reports if halves else {}
        loop = Loop(
            fake,
            fake,
            PolicyStore(fake),
            fake.validate,
            config,
            report=lambda i, metrics, into=reports: into.update({i: metrics}),
            save=lambda i, loop=lambda: loop: states.append(loop().state_dict()),
        )
        if states:
            loop.load_state_dict(states[-1])
        halves.append(SimpleNamespace(best=loop.run(), reports=reports, fake=fake))
    assert (halves[1].best.score, halves[1].best.iteration) == (0.8, 1) == (whole.best.score, whole.best.iteration)
    assert halves[1].fake.parameters["w"].tolist() == whole.final and halves[1].fake.version == whole.fake.version
    for i, metrics in whole.reports.items():
        assert without_seconds(halves[1].reports[i]) == without_seconds(metrics) or i == 0


def without_seconds(metrics):
    return {name: value for name, value in metrics.items() if not name.endswith("_s")}


def test_the_seconds_of_an_iteration_are_those_of_its_parts():
    """Simulation and inference are the source's; an iteration is all of it, validation included."""

    class Slow(Fake):
        def next(self):
            time.sleep(0.02)
            return super().next()

        def update(self, rollout):
            time.sleep(0.01)
            return super().update(rollout)

        def validate(self):
            time.sleep(0.03)
            return super().validate()

    found = run([0.1, 0.2], Slow, iterations=2, validate_every=2)
    first, second = found.reports[1], found.reports[2]
    assert "time/validate_s" not in first and second["time/validate_s"] >= 0.03
    assert first["time/learn_s"] >= 0.01 and first["time/iteration_s"] >= 0.03
    assert second["time/iteration_s"] >= 0.02 + second["time/learn_s"] + second["time/validate_s"]
    assert "time/iteration_s" not in found.reports[0] and found.reports[0]["time/validate_s"] >= 0.03


@pytest.mark.parametrize("part", ["learner", "source", "store"])
def test_a_run_that_cannot_save_its_state_says_so_and_runs(part):
    class Stateless:
        """Delegates all but the state."""

        def __init__(self, whole):
            self.next, self.update, self.publish = whole.next, whole.update, getattr(whole, "publish", None)
            self.parameters, self.lr = getattr(whole, "parameters", None), 1.0

    fake = Fake([])
    parts = {"learner": fake, "source": fake, "store": PolicyStore(fake)}
    store = parts["store"]
    fake.publish = store.publish
    parts[part] = Stateless(fake)
    loop = Loop(parts["source"], parts["learner"], parts["store"], None, LoopConfig(iterations=3))
    assert f"the {part} Stateless cannot save its state, so this run cannot be resumed" in loop.not_resumable()
    assert loop.run().iteration == 3
    assert Loop(fake, fake, store, None, LoopConfig()).not_resumable() == ""


def test_the_share_that_is_done_is_published_with_the_weights():
    """Also to a resumed run, and with the best weights after a collapse and at the end."""
    fake, states = Fake([0.9, 0.1, 0.9, 0.9, 0.9]), []
    fake.done = []
    fake.encode = fake.initial_state = fake.reset_state = fake.act = print  # never called; they make it a policy
    fake.set_progress = fake.done.append
    config = LoopConfig(iterations=4, validate_every=1)
    loop = Loop(fake, fake, PolicyStore(fake), fake.validate, config)
    loop.save = lambda iteration: states.append(loop.state_dict())
    loop.run()
    assert fake.done == [0.0, 0.25, 0.25, 0.5, 0.75, 1.0, 1.0]
    resumed = Loop(fake, fake, PolicyStore(fake), fake.validate, config)
    resumed.load_state_dict(states[2])
    assert fake.done[-2:] == [0.0, 0.5]


def test_the_share_of_the_actions_is_published_too():
    """10 actions an iteration; the run ends after 40."""
    published = []

    class Store(PolicyStore):
        def publish(self, weights, progress=0.0):
            published.append(progress)
            return super().publish(weights, progress)

    fake = Fake([])
    Loop(fake, fake, Store(fake), None, LoopConfig(iterations=100, env_steps=40)).run()
    assert published == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_the_share_that_is_done_is_never_more_than_all():
    """The last iteration takes more actions than were left; noise that falls with the share must not fall below 0."""
    loop = Loop(fake := Fake([]), fake, PolicyStore(fake), None, LoopConfig(iterations=100, env_steps=3))
    loop.run()
    assert (loop.env_steps, loop.progress()) == (10.0, 1.0)


class RollingBack(Fake):
    """A learner that restores more than its weights."""

    def best_state(self):
        return {"w": self.parameters["w"].detach().clone(), "critic": torch.tensor(float(self.calls.count("update")))}

    def roll_back(self, state, lr_factor):
        self.calls.append(("roll back", float(state["critic"]), lr_factor))
        with torch.no_grad():
            self.parameters["w"].copy_(state["w"])


def test_after_a_collapse_the_learner_restores_its_best_state():
    fake = RollingBack([0.2, 0.7, 0.3, 0.6])
    store, saved = PolicyStore(fake), {}
    config = LoopConfig(iterations=3, validate_every=1)
    loop = Loop(
        fake, fake, store, fake.validate, config, save=lambda i: saved.update({i: copy.deepcopy(loop.state_dict())})
    )
    loop.run()
    assert [call for call in fake.calls if isinstance(call, tuple)] == [("roll back", 1.0, 0.5)]
    assert fake.weights_at == [0, 1, 2, 2], "the third update starts from the best weights"
    other = RollingBack([0.1])
    resumed = Loop(other, other, PolicyStore(other), other.validate, config)
    resumed.load_state_dict(saved[1])
    resumed.iteration = 2
    resumed.run()
    assert ("roll back", 1.0, 0.5) in other.calls
