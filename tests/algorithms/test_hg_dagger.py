"""HG-DAgger: what is imitated is what a person chose, whoever acted before; a known optimum; resumed bit for bit."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.toys import FlowToy, all_shown, rollout, seeded
from vla_rl.algorithms.chunks import (
    Chunks,
    FamiliesEqually,
    HGDagger,
    HGDaggerConfig,
    TasksEqually,
    chunks_of,
    drawn_equally,
    mean_loss,
)
from vla_rl.contract.batch import Rollout
from vla_rl.contract.policy import ActionOut
from vla_rl.policies.normalization import Affine

H, D = 3, 1


class Table(FlowToy):
    """One number for every place of a chunk; the loss of each is its squared error."""

    action_scale = Affine((1.0,), (2.0,))

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(H, D))

    def imitation_losses(self, features: Any, chunks: Tensor, draws: int, generator: Any) -> Tensor:
        return (self.rows - chunks).square().mean(-1)


class Chunked(FlowToy):
    """A flow over chunks of H actions; what is asked for is executed as it is."""

    action_scale = Affine((0.0,) * D, (1.0,) * D)

    def __init__(self) -> None:
        super().__init__(dims=H * D)

    def chunk(self, state: Tensor, seed: int) -> Tensor:
        out, _ = self.act({"state": state}, {}, "eval", seeded(seed))
        return out.action.reshape(len(state), H, D)


def experience(state: Tensor, executed: Tensor, intervened: Tensor, **changes: Any) -> Rollout:
    """One decision in every environment: ``executed`` [E,H,D], of which a person chose ``intervened`` [E,H]."""
    out = ActionOut(executed, executed, torch.zeros(len(state)), {}, 0)
    reward = torch.zeros(1, *intervened.shape)
    changes = {"version": torch.zeros(1, len(state), dtype=torch.long), **changes}
    return rollout({"state": torch.stack([state, state])}, out, reward, intervened=intervened[None], **changes)


def learner(policy: FlowToy, demonstrations: Chunks | None = None, **config: Any) -> HGDagger:
    return HGDagger(policy, policy.trainable(), demonstrations, HGDaggerConfig(**config), seeded(3))


def test_only_what_a_person_chose_and_was_executed_is_imitated() -> None:
    policy = Table()
    state = torch.tensor([[0.1], [0.2], [0.3]])
    executed = torch.tensor([[1.0, 3.0, 5.0], [7.0, 9.0, 11.0], [13.0, 15.0, 17.0]])[..., None]
    human = torch.tensor([[False, True, True], [False, False, False], [True, False, True]])
    valid = torch.tensor([[True, True, True], [True, True, True], [True, True, False]])
    found = experience(state, executed, human, valid=valid[None])
    agent = learner(Table(), steps=1)
    assert agent.add(found) == 2 and agent.kept is not None
    chunks = agent.kept
    assert chunks.features["state"].flatten().tolist() == pytest.approx([0.1, 0.3])
    assert chunks.actions[..., 0].tolist() == [[0.0, 1.0, 2.0], [6.0, 7.0, 8.0]]  # normalised: (a - 1) / 2
    assert chunks.counts.tolist() == [[False, True, True], [True, False, False]]
    assert learner(Table(), steps=1).update(found)["rollout/intervened"] == 3 / 8
    # the mean over three actions of their squared distance from 0
    assert float(mean_loss(policy, chunks, 1, seeded()).detach()) == pytest.approx((1 + 4 + 36) / 3)


def test_places_outside_the_mask_have_no_gradient() -> None:
    policy = Table()
    found = experience(torch.zeros(1, 1), torch.full((1, H, D), 9.0), torch.tensor([[False, True, False]]))
    mean_loss(policy, chunks_of(found, found.intervened, policy), 1, seeded()).backward()
    assert policy.rows.grad is not None
    assert policy.rows.grad.flatten().tolist() == [0.0, -8.0, 0.0]  # 2 (0 - 4)


def test_the_loss_of_each_action_belongs_to_its_decision() -> None:
    policy, chunks = Chunked(), torch.zeros(4, H, D)
    chunks[2, 1] = 100.0
    losses = policy.imitation_losses({"state": torch.zeros(4, 1)}, chunks, 3, seeded())
    assert losses.argmax() == 2 * H + 1 and losses[2, 1] > 100 * losses[0].max()


def test_demonstrations_enter_by_their_weight() -> None:
    state, actions = torch.zeros(4, 1), torch.full((4, H, D), 2.0)
    shown = all_shown({"state": state}, actions, torch.zeros(4, dtype=torch.long))
    found = experience(state, torch.full((4, H, D), 3.0), torch.ones(4, H) > 0)  # normalised: 1
    metrics = learner(Table(), shown, alpha=0.25, steps=1).update(found)
    assert metrics["policy/loss"] == pytest.approx(1.0 + 0.25 * 4.0)
    assert "policy/demonstration_loss" not in learner(Table(), shown, alpha=0.0, steps=1).update(found)


def test_nothing_changes_until_a_person_intervenes() -> None:
    policy = Table()
    metrics = learner(policy).update(experience(torch.zeros(2, 1), torch.ones(2, H, D), torch.zeros(2, H) > 0))
    assert not policy.rows.any() and metrics["rollout/intervened"] == 0.0


def test_tasks_are_equally_likely() -> None:
    task = torch.tensor([0] * 98 + [1] * 2)
    chunks = all_shown({"state": torch.zeros(100, 1)}, torch.zeros(100, H, D), task)
    share = task[drawn_equally(chunks.task, 20_000, seeded())].double().mean()
    assert abs(float(share) - 0.5) < 5 * math.sqrt(0.25 / 20_000)


def test_a_family_of_many_instructions_counts_once() -> None:
    task = torch.tensor([0] * 50 + [1] * 30 + [2] * 20)
    chunks = all_shown({"state": torch.zeros(100, 1)}, torch.zeros(100, H, D), task)
    drawn = FamiliesEqually(["push", "push", "lift"]).draw(chunks, task > 9, 20_000, seeded())
    found = torch.bincount(task[drawn]) / 20_000
    assert torch.allclose(found, torch.tensor([0.5 * 50 / 80, 0.5 * 30 / 80, 0.5]), atol=0.02)


def test_the_sampler_chooses_corrections_and_demonstrations() -> None:
    class First(TasksEqually):
        sizes: tuple[int, ...] = ()

        def draw(self, chunks: Chunks, human: Tensor, size: int, generator: torch.Generator) -> Tensor:
            First.sizes = (*First.sizes, len(chunks))
            return torch.zeros(size, dtype=torch.long)

    shown = all_shown({"state": torch.zeros(5, 1)}, torch.ones(5, H, D), torch.zeros(5, dtype=torch.long))
    policy = Table()
    agent = HGDagger(policy, policy.trainable(), shown, HGDaggerConfig(steps=1), seeded(3), First())
    agent.update(experience(torch.zeros(2, 1), torch.zeros(2, H, D), torch.ones(2, H) > 0))
    assert First.sizes == (2, 5)


def test_the_oldest_corrections_leave() -> None:
    agent = learner(Table(), capacity=3, steps=1)
    for value in (1.0, 2.0, 3.0):
        agent.update(experience(torch.full((2, 1), value), torch.zeros(2, H, D), torch.ones(2, H) > 0))
    assert agent.corrections is not None
    assert agent.corrections.features["state"].flatten().tolist() == [2.0, 3.0, 3.0]


def optimum(state: Tensor) -> Tensor:
    """The best chunk [B,H,D] in ``state`` [B,1]."""
    return torch.stack([0.5 * state, -0.4 + 0.0 * state, 0.3 - 0.3 * state], 1)


def corrected(policy: Chunked, seed: int) -> Rollout:
    """A decision in 128 random states; a person takes over from the first action on that is .15 off."""
    state = 2 * torch.rand(128, 1, generator=seeded(seed)) - 1
    chosen, best = policy.chunk(state, seed), optimum(state)
    off = ((chosen - best).abs().amax(-1) > 0.15).long().cummax(1).values > 0
    version = torch.full((1, 128), policy.version)
    return experience(state, torch.where(off[..., None], best, chosen), off, version=version)


def test_it_reaches_the_optimum_that_a_person_shows() -> None:
    torch.manual_seed(0)
    policy = Chunked().pretrain(20)
    agent, shares = learner(policy, steps=40, batch=64, lr=6e-3), []
    for seed in range(8):
        shares.append(agent.update(corrected(policy, seed))["rollout/intervened"])
        policy.version += 1
    state = torch.linspace(-1, 1, 201)[:, None]
    error = (policy.chunk(state, 99) - optimum(state)).square().mean().sqrt()
    assert error < 0.08
    assert shares[0] > 0.7 and shares[-1] < 0.1


def test_a_resumed_learner_is_the_same_bit_for_bit() -> None:
    def fresh() -> HGDagger:
        torch.manual_seed(0)
        return learner(Chunked(), steps=5)

    state, agent, resumed = torch.rand(9, 1, generator=seeded()), fresh(), fresh()
    found = experience(state, optimum(state), torch.ones(9, H) > 0)
    agent.update(found)
    resumed.load_state_dict(copy.deepcopy(agent.state_dict()))
    for each in (agent, resumed):
        each.update(found)
    for name, parameter in agent.parameters.items():
        assert torch.equal(parameter, resumed.parameters[name])
    assert agent.corrections is not None and len(agent.corrections) == 18
