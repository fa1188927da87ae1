"""Faults in whole runs on another device than the host: policies, learners, world models."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ENV, _ON_DEVICE = "world_models/env.py", "tests/world_models/test_device.py::"

_RUNS = "tests/training/test_on_another_device.py::"


def _of_run(name: str) -> tuple[str, ...]:
    return (f"{_RUNS}test_a_run_on_another_device_is_that_on_the_host[{name}]",)


_RECIPE, _COMPARISON = "vla_rl/recipes/imagine/recipe.py", "vla_rl/recipes/imagine/comparison.py"
_OFF, _REWARDS = "vla_rl/recipes/off_policy.py", "vla_rl/recipes/train_rewards.py"
_ON_RECIPES = "tests/recipes/test_device.py::"
_ON_DEPLOYED = "tests/recipes/test_deployed.py::test_a_policy_computes_on_the_device_that_is_named"
_REPLAYED = f"{_ON_RECIPES}test_off_policy_rl_with_its_replay_on_the_device_of_the_config"
_IMAGINED = ("tests/recipes/imagine/test_comparison.py::test_a_whole_run_on_another_device_is_that_on_the_host",)

FAULTS = (
    Fault(
        "a suite's policy stays on the host",
        "vla_rl/recipes/suite_player.py",
        "deployed(self.policy, self.task.env, self.device, options=self.vla)",
        "deployed(self.policy, self.task.env, options=self.vla)",
        (f"{_ON_RECIPES}test_a_suite_on_the_device_of_the_command",),
    ),
    Fault(
        "a suite goes on where another device rounded",
        "vla_rl/recipes/suite_run.py",
        '"device": resolve_device(self.device).type}',
        '"device": "cpu"}',
        (f"{_ON_RECIPES}test_a_suite_on_the_device_of_the_command",),
    ),
    Fault(
        "an evaluated checkpoint stays on the host",
        "vla_rl/cli/eval_checkpoint.py",
        "config.env, config.device, options",
        "config.env, options",
        (f"{_ON_RECIPES}test_a_checkpoint_on_the_device_of_the_command",),
    ),
    Fault(
        "a served policy stays on the host",
        "vla_rl/cli/serve_policy.py",
        "placed(load_policy(checkpoint, spec, config.vla), resolve_device(config.device))",
        "placed(load_policy(checkpoint, spec, config.vla), resolve_device())",
        ("tests/cli/test_serve_policy.py::test_a_policy_is_served_from_the_device_of_the_command",),
    ),
    Fault(
        "a policy that is renumbered stays on the host",
        "vla_rl/recipes/deployed.py",
        "policy = placed(load_policy(folder, replace(spec, tasks=trained.tasks, families=trained.families)), device)",
        "policy = load_policy(folder, replace(spec, tasks=trained.tasks, families=trained.families))",
        (f"{_ON_DEPLOYED}[mixed]",),
    ),
    Fault(
        "a policy that a class makes stays on the host",
        "vla_rl/recipes/deployed.py",
        "policy = placed(new_policy(name, spec, {}, seed), where)",
        "policy = new_policy(name, spec, {}, seed)",
        (f"{_ON_DEPLOYED}[tests.recipes.test_deployed:new_policy]",),
    ),
    Fault(
        "the replay buffer of a run stays on the host",
        _OFF,
        "if self.folder else InMemory(device)",
        "if self.folder else InMemory()",
        (f"{_REPLAYED}[in memory]",),
    ),
    Fault(
        "batches from a replay buffer on disk stay on the host",
        "vla_rl/experience/replay.py",
        "return _on_device(found, self.storage.device)",
        "return found",
        (f"{_REPLAYED}[on disk]",),
    ),
    Fault(
        "demonstrations of a run stay on the host",
        _OFF,
        "self.n_step, InMemory(device))",
        "self.n_step)",
        (f"{_REPLAYED}[in memory]",),
    ),
    Fault(
        "a success classifier is trained on the host",
        _REWARDS,
        "SuccessClassifier.for_frames(frames, self.network).to(resolve_device(self.device))",
        "SuccessClassifier.for_frames(frames, self.network)",
        (f"{_ON_RECIPES}test_reward_models_on_the_device_of_the_config[success]",),
    ),
    Fault(
        "a progress critic is trained on the host",
        _REWARDS,
        "ProgressCritic.for_frames(frames, self.network).to(resolve_device(self.device))",
        "ProgressCritic.for_frames(frames, self.network)",
        (f"{_ON_RECIPES}test_reward_models_on_the_device_of_the_config[progress]",),
    ),
    Fault(
        "the policy of imagination stays on the host",
        _RECIPE,
        "policy = placed(self._start(folder), device)",
        "policy = self._start(folder)",
        _IMAGINED,
    ),
    Fault(
        "the critic of imagination stays on the host",
        _RECIPE,
        "current_reducer(), device=device)",
        "current_reducer())",
        _IMAGINED,
    ),
    Fault(
        "the world model of imagination stays on the host",
        "vla_rl/recipes/imagine/train_model.py",
        "statistics(episodes.learnt)).to(device)",
        "statistics(episodes.learnt))",
        _IMAGINED,
    ),
    Fault(
        "the world model of a resumed run stays on the host",
        "vla_rl/recipes/imagine/train_model.py",
        "plan.imagination, device)",
        "plan.imagination)",
        _IMAGINED,
    ),
    Fault(
        "policies are rated on the host",
        _COMPARISON,
        "placed(load_policy(folder), device) for",
        "load_policy(folder) for",
        _IMAGINED,
    ),
    Fault(
        "a world model is rated on the host",
        _COMPARISON,
        "calibrated.model.to(device)",
        "pass",
        _IMAGINED,
    ),
    Fault(
        "the runs of a sweep are on the host whatever it was given",
        "vla_rl/recipes/sweep.py",
        'return () if device == "cpu" else',
        "return () if device else",
        (
            "tests/recipes/imagine/test_study.py::test_the_device_is_that_of_every_run",
            "tests/recipes/imagine/test_comparison.py::test_the_device_of_the_comparison_is_that_of_its_runs",
        ),
    ),
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
        "known, self._to_device(noise), steps)",
        "known, torch.from_numpy(noise), steps)",
        (f"{_ON_DEVICE}test_imagined_rollouts_on_a_device_are_those_of_the_host",),
    ),
    Fault(
        "what a step returns stays on the host",
        _ENV,
        "(self._to_device(valid), valid)",
        "(torch.from_numpy(valid), valid)",
        (f"{_ON_DEVICE}test_imagined_rollouts_on_a_device_are_those_of_the_host",),
    ),
    Fault(
        "the steps of a rollout stay on the host",
        "vla_rl/experience/rollout.py",
        "torch.as_tensor(item, device=decision.out.sample.device)",
        "torch.as_tensor(item, device='cpu')",
        _of_run("ppo"),
    ),
    Fault(
        "a rollout stays on the device of the imagined environment",
        "vla_rl/experience/rollout.py",
        "torch.as_tensor(item, device=decision.out.sample.device)",
        "torch.as_tensor(item)",
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
