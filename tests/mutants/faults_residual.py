"""Faults in residual policies, heads, critics and residual TD3."""

from __future__ import annotations

from tests.mutants.fault import Fault

_RESIDUAL, _HEADS, _CRITICS, _FUNCTION = (
    f"vla_rl/policies/{name}.py" for name in ("residual", "heads", "critics", "function")
)
_OFF, _TD3, _LOOP = "vla_rl/algorithms/off_policy.py", "vla_rl/algorithms/residual_td3.py", "vla_rl/training/loop.py"
_ON_RESIDUAL, _ON_HEADS = "tests/policies/test_residual.py::", "tests/policies/test_heads.py::"
_ON_HORIZON = "tests/policies/test_residual_horizon.py::"
_ON_TD3, _ON_OFF = "tests/algorithms/test_residual_td3.py::", "tests/algorithms/test_off_policy.py::"
_TARGET = f"{_ON_TD3}test_the_target_by_hand"
_BASE = f"{_ON_RESIDUAL}test_at_first_it_is_the_base_chunk_by_chunk_after_every_kind_of_end"
_ROWS = f"{_ON_RESIDUAL}test_environments_have_base_chunks_of_their_own"

_POLICIES = (
    Fault(
        "the actor is pushed away from what was tried",
        "vla_rl/algorithms/residual_td3.py",
        "loss = loss + self.config.anchor *",
        "loss = loss - self.config.anchor *",
        ("tests/algorithms/test_residual_td3.py::test_the_anchor_keeps_the_actor_near_what_was_tried",),
    ),
    Fault(
        "the base's queue outlives its episode",
        _RESIDUAL,
        "left[torch.as_tensor(env_ids, dtype=torch.long)] = 0",
        "left[torch.as_tensor(env_ids, dtype=torch.long)] *= 1",
        (_BASE,),
    ),
    Fault(
        "the base's own state outlives its episode",
        _RESIDUAL,
        "base_state = self.base.reset_state(_base_entries(state), env_ids)",
        "base_state = _base_entries(state)",
        (_BASE,),
    ),
    Fault(
        "the base's new state is dropped",
        _RESIDUAL,
        "            merged[name][env_ids.to(item.device)] = item",
        "            merged[name][env_ids.to(item.device)] = merged[name][env_ids.to(item.device)]",
        (_BASE,),
    ),
    Fault(
        "the base's chunk of one environment goes to another",
        _RESIDUAL,
        "queue[env_ids, : chunk.shape[1]] = self",
        "queue[env_ids.flip(0), : chunk.shape[1]] = self",
        (_ROWS,),
    ),
    Fault(
        "the plan shows what is not in the queue any more",
        _RESIDUAL,
        "(position < left[:, None])[..., None]",
        "(position < 99 + left[:, None])[..., None]",
        (f"{_ON_RESIDUAL}test_the_rest_of_the_queue_is_observed_and_nothing_after_it",),
    ),
    Fault(
        "a decision that corrects several actions uses up one",
        _RESIDUAL,
        "left - self.horizon}",
        "left - 1}",
        (f"{_ON_HORIZON}test_at_first_it_is_the_base_after_every_kind_of_end",),
    ),
    Fault(
        "the plan begins at the second action, which is corrected already",
        _RESIDUAL,
        "position = torch.arange(self.horizon, self.horizon + self.config.plan, device=left.device)",
        "position = torch.arange(1, 1 + self.config.plan, device=left.device)",
        (f"{_ON_HORIZON}test_it_reads_the_actions_that_it_corrects_and_those_after_them",),
    ),
    Fault(
        "the first correction is that of all actions",
        _RESIDUAL,
        "self.corrected(features, u), dict[str, Tensor]()",
        "self.corrected(features, u[:, : self.spec.action_dim].repeat(1, self.horizon)), dict[str, Tensor]()",
        (f"{_ON_HORIZON}test_every_action_has_a_correction_of_its_own",),
    ),
    Fault(
        "a Gaussian residual's density is that of its first action",
        _RESIDUAL,
        "return Likelihood(terms.sum(-1, dtype=torch.float64), entropy, params)",
        "return Likelihood(terms[:, : self.spec.action_dim].sum(-1, dtype=torch.float64), entropy, params)",
        (f"{_ON_HORIZON}test_it_keeps_the_contract_and_learning_sees_the_density_of_acting",),
    ),
    Fault(
        "a chunk that the residual cannot divide is cut off",
        _RESIDUAL,
        "if chunk.shape[1] % self.horizon:",
        "if chunk.shape[1] < self.horizon:",
        (f"{_ON_HORIZON}test_a_horizon_that_does_not_fit_is_refused",),
    ),
    Fault(
        "the noise grows with its correlation",
        _RESIDUAL,
        "(1.0 - correlation**2) ** 0.5",
        "1.0 - self.config.correlation * 0.0",
        (f"{_ON_RESIDUAL}test_the_noise_is_an_ornstein_uhlenbeck_process",),
    ),
    Fault(
        "the noise of an episode goes on in the next",
        _RESIDUAL,
        "noise[index] = 0.0",
        "noise[index] *= 1.0",
        (f"{_ON_RESIDUAL}test_the_noise_is_an_ornstein_uhlenbeck_process",),
    ),
    Fault(
        "critics get a correction that the bounds clipped",
        _RESIDUAL,
        "total = self.corrected(features, self.correction(features)).clamp(-1.0, 1.0)",
        "total = self.corrected(features, self.delta(features))",
        (f"{_ON_RESIDUAL}test_it_corrects_by_at_most_its_scale_within_the_bounds",),
    ),
    Fault(
        "a residual's density leaves out its std",
        _RESIDUAL,
        ".square() - std.log() - 0.5",
        ".square() - 0.5",
        ("tests/policies/test_likelihoods.py::test_densities_entropies_and_kl_are_those_of_torch[residual]",),
    ),
    Fault(
        "recorded actions have a squashed density without its slope",
        _HEADS,
        "return density - log_tanh_derivative(u)",
        "return density",
        (f"{_ON_HEADS}test_a_squashed_density_is_that_of_torch",),
    ),
    Fault(
        "critics share their first layer",
        _CRITICS,
        "return torch.baddbmm(self.bias, x, self.weight)",
        "return torch.baddbmm(self.bias, x, self.weight[:1].expand_as(self.weight))",
        ("tests/policies/test_critics.py::test_the_loss_of_one_critic_moves_no_other",),
    ),
    Fault(
        "a function's actions for all rows are taken as one row's chunk",
        _FUNCTION,
        "if action.dim() != 3 or action",
        "if action.dim() == 3 and action",
        ("tests/policies/test_function.py::test_what_is_chosen_stays_within_the_bounds_and_has_a_chunk_per_row",),
    ),
)

_LEARNING = (
    Fault(
        "critics are regressed on their mean",
        _OFF,
        "loss = errors.mean(1).sum() + self",
        "loss = len(value) * (value.mean(0) - target).square().mean() + self",
        (f"{_ON_OFF}test_critics_that_start_apart_converge", f"{_ON_OFF}test_each_critic_is_regressed_on_its_own"),
    ),
    Fault(
        "the pair is drawn with replacement",
        _OFF,
        "torch.randperm(self.critic.num_critics, generator=self.generator)[: self.config.num_min_q]",
        "torch.randint(self.critic.num_critics, (self.config.num_min_q,), generator=self.generator)",
        (f"{_ON_OFF}test_the_minimum_is_over_a_random_pair_without_replacement",),
    ),
    Fault("targets are the mean of the pair", _OFF, "[chosen].amin(0)", "[chosen].mean(0)", (_TARGET,)),
    Fault(
        "targets by the critics themselves",
        _OFF,
        "self.target_critic(features, action)[",
        "self.critic(features, action)[",
        (_TARGET,),
    ),
    Fault(
        "targets by the policy itself",
        _TD3,
        "swapped(self.learnt, self.target_parameters)",
        "swapped(self.target_parameters, self.target_parameters)",
        (_TARGET,),
    ),
    Fault(
        "targets are smoothed without a bound",
        _TD3,
        "noise.clamp(-self.config.target_clip, self.config.target_clip)",
        "noise",
        (_TARGET,),
    ),
    Fault(
        "the actor ascends the minimum of the critics",
        _TD3,
        "loss = action.square().sum(-1).mean(), -self.critic(batch.features, action).mean()",
        "loss = action.square().sum(-1).mean(), -self.critic(batch.features, action).amin(0).mean()",
        (f"{_ON_TD3}test_the_actor_ascends_the_mean_of_all_critics_minus_the_penalty",),
    ),
    Fault(
        "the target critics are never updated",
        _OFF,
        "target.lerp_(online, self.config.tau)",
        "target.lerp(online, self.config.tau)",
        (f"{_ON_TD3}test_target_weights_are_soft_updates_of_the_weights",),
    ),
    Fault(
        "the actor's loss trains the critics",
        _OFF,
        "            parameter.requires_grad_(False)",
        "            parameter.requires_grad_(True)",
        (f"{_ON_OFF}test_the_actor_step_leaves_the_critics_unchanged",),
    ),
    Fault(
        "half steps are lost",
        _OFF,
        "            self.update_debt -= 1",
        "            self.update_debt = self.update_debt // 1 - 1",
        (f"{_ON_OFF}test_steps_follow_the_decisions_once_there_are_enough",),
    ),
    Fault(
        "the base's temperature is passed over",
        "vla_rl/recipes/policies.py",
        'at_temperature(encoder, self.temperature, "--rl.policy.temperature")',
        'at_temperature(encoder, None, "--rl.policy.temperature")',
        (
            "tests/recipes/test_trainers.py::test_a_residual_acts_on_a_base_of_the_temperature_that_is_chosen_and_keeps_it",
        ),
    ),
    Fault(
        "idle decisions call for steps",
        _OFF,
        "self._of_all(int(rollout.valid.any(-1).sum()), len",
        "self._of_all(rollout.valid[..., 0].numel(), len",
        (f"{_ON_OFF}test_steps_follow_the_decisions_once_there_are_enough",),
    ),
    Fault(
        "the actor is trained before the critics",
        _OFF,
        "if turn and self.steps >= self.config.critic_warmup and self.guard.free:",
        "if turn:",
        (f"{_ON_OFF}test_the_actor_waits_for_the_warmup_and_then_steps_every_policy_delay",),
    ),
    Fault(
        "a learner that goes on has other slow weights",
        _TD3,
        'name: state["target_parameters"][name].to(parameter.device, copy=True)',
        "name: self.target_parameters[name]",
        (f"{_ON_TD3}test_a_resumed_run_is_bit_identical",),
    ),
    Fault(
        "validation by actions comes once only",
        _LOOP,
        "found, self.validated_at = self.validate(), self.env_steps",
        "found = self.validate()",
        ("tests/training/test_loop.py::test_validation_comes_after_so_many_actions_too",),
    ),
)

FAULTS = (*_POLICIES, *_LEARNING)
