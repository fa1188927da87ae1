"""Ensembles of critics: the critics are separate networks."""

from __future__ import annotations

import torch
from torch import nn

from vla_rl.contract.batch import OneProcess
from vla_rl.policies.critics import QEnsemble
from vla_rl.policies.heads import HeadConfig

SIZES, NUM_CRITICS, WIDTH = {"state": 3, "plan": 2}, 4, 8


def made() -> QEnsemble:
    torch.manual_seed(0)
    return QEnsemble(SIZES, 2, NUM_CRITICS, HeadConfig(WIDTH, 2)).double()


def inputs(count: int = 9) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    state, plan, action = torch.randn(3, count, 3, generator=torch.Generator().manual_seed(1)).double()
    return {"state": state, "plan": plan[:, :2]}, action[:, :2]


def alone(critic: QEnsemble, k: int) -> nn.Sequential:
    """One critic of the ensemble as an ordinary network."""
    layers: list[nn.Module] = []
    with torch.no_grad():
        for side in critic.layers:
            weight = side.linear.weight[k]
            linear, norm = nn.Linear(*weight.shape).double(), nn.LayerNorm(weight.shape[1]).double()
            linear.weight.copy_(weight.T), linear.bias.copy_(side.linear.bias[k, 0])
            norm.weight.copy_(side.scale[k, 0]), norm.bias.copy_(side.shift[k, 0])
            layers += [linear, norm, nn.SiLU()]
        last = nn.Linear(WIDTH, 1).double()
        last.weight.copy_(critic.last.weight[k].T), last.bias.copy_(critic.last.bias[k, 0])
    return nn.Sequential(*layers, last)


def test_every_critic_is_a_network_of_its_own():
    critic, (features, action) = made(), inputs()
    for parameter in critic.parameters():
        nn.init.normal_(parameter)  # those of the inputs are set next
    critic.calibrate({name: 2 + 3 * item for name, item in features.items()}, OneProcess())
    value = critic(features, action)
    given = torch.cat([critic.inputs(features), action], 1)
    assert value.shape == (NUM_CRITICS, 9)
    for k in range(NUM_CRITICS):
        torch.testing.assert_close(value[k], alone(critic, k)(given)[:, 0])
    changed = critic(features, action + 0.1)
    assert (changed != value).all() and (critic({**features, "plan": action}, action) != value).all()


def test_the_loss_of_one_critic_moves_no_other():
    critic = made()
    for k in range(NUM_CRITICS):
        critic.zero_grad()
        critic(*inputs())[k].square().sum().backward()
        for name, parameter in critic.named_parameters():
            if name.startswith("inputs."):
                assert parameter.grad is None
                continue
            norms = parameter.grad.flatten(1).norm(dim=1)
            assert norms[k] > 0 and norms.count_nonzero() == 1, name


def test_critics_start_apart_in_the_range_of_pytorch():
    critic = made()
    values = critic(*inputs())
    assert values.std(0).min() > 1e-3
    for layer in [*(side.linear for side in critic.layers), critic.last]:
        bound = layer.weight.shape[1] ** -0.5
        assert 0.8 * bound < layer.weight.abs().max() <= bound and 0.5 * bound < layer.bias.abs().max() <= bound
        assert len({tuple(weight.flatten().tolist()) for weight in layer.weight}) == NUM_CRITICS
