"""Faults in whole runs on another device than the host: policies, learners, world models."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ENV, _ON_DEVICE = "world_models/env.py", "tests/world_models/test_device.py::"

_RUNS = "tests/training/test_on_another_device.py::"


def _of_run(name: str) -> tuple[str, ...]:
    return (f"{_RUNS}test_a_run_on_another_device_is_that_on_the_host[{name}]",)


FAULTS = (
    Fault(
        "every draw of a policy stays on the host",
        "vla_rl/policies/residual.py",
        "normal(total.shape, generator, like=total)",
        "normal(total.shape, generator, like=total.cpu())",
        _of_run("residual td3"),
    ),
    Fault(
        "the frozen base stays on the host",
        "vla_rl/policies/frozen.py",
        "part.to(self.action_low.device)",
        "part.to('cpu')",
        _of_run("residual ppo"),
    ),
    Fault(
        "the base's queue lies on the host",
        "vla_rl/policies/residual.py",
        "queue = torch.zeros(num_envs, length, self.spec.action_dim, device=device)",
        "queue = torch.zeros(num_envs, length, self.spec.action_dim)",
        _of_run("residual td3"),
    ),
    Fault(
        "a resumed run decides on features of the host",
        "vla_rl/experience/rollout.py",
        'features = {name: item.to(device) for name, item in state["features"].items()}',
        'features = dict(state["features"])',
        _of_run("sac"),
    ),
    Fault(
        "a resumed policy's own state is on the host",
        "vla_rl/experience/rollout.py",
        "item.to(like[name].device) for name",
        "item for name",
        _of_run("residual td3"),
    ),
    Fault(
        "versions of decisions lie on the host",
        "vla_rl/experience/columns.py",
        "version=torch.tensor([[out.policy_version] for out in outs], device=device)",
        "version=torch.tensor([[out.policy_version] for out in outs])",
        _of_run("grpo"),
    ),
    Fault(
        "the value network of IQL stays on the host",
        "vla_rl/algorithms/iql.py",
        "self.value.to(next(critic.parameters()).device)",
        "self.value.to('cpu')",
        _of_run("iql"),
    ),
    Fault(
        "resumed target weights are on the host",
        "vla_rl/algorithms/residual_td3.py",
        'state["target_parameters"][name].to(parameter.device, copy=True)',
        'state["target_parameters"][name].clone()',
        _of_run("residual td3"),
    ),
    Fault(
        "normalization constants stay on the host",
        "vla_rl/policies/normalization.py",
        "torch.tensor(affine.scale, dtype=dtype).to(device)",
        "torch.tensor(affine.scale, dtype=dtype)",
        _of_run("ppo"),
    ),
    Fault(
        "noise stays on the host",
        _ENV,
        "known, self._to_device(noise))",
        "known, torch.from_numpy(noise))",
        (f"{_ON_DEVICE}test_imagined_rollouts_on_a_device_are_those_of_the_host",),
    ),
    Fault(
        "what a step returns stays on the host",
        _ENV,
        "action, frames).mapped(self._output)",
        "action, frames)",
        (f"{_ON_DEVICE}test_imagined_rollouts_on_a_device_are_those_of_the_host",),
    ),
    Fault(
        "a rollout stays on the device of the imagined environment",
        "vla_rl/experience/rollout.py",
        "device=decision.out.sample.device",
        "device='cpu'",
        (f"{_ON_DEVICE}test_rollouts_from_another_device_are_on_the_policys_device",),
    ),
    Fault(
        "a world model is trained on the device of its episodes",
        "vla_rl/training/world_model.py",
        "torch.from_numpy(item).to(device)",
        "torch.from_numpy(item)",
        (f"{_ON_DEVICE}test_training_on_another_device_gives_the_weights_of_the_host",),
    ),
)
