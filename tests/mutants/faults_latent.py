"""Faults in policies over the latent noise of a flow, DSRL and GoRL."""

from __future__ import annotations

from tests.mutants.fault import Fault

_POLICY, _ON_POLICY = "vla_rl/policies/latent_noise.py", "tests/policies/test_latent_noise.py::"
_DSRL, _ON_DSRL = "vla_rl/algorithms/dsrl.py", "tests/algorithms/test_dsrl.py::"
_GORL, _ON_GORL = "vla_rl/algorithms/gorl.py", "tests/algorithms/test_gorl.py::"
_DECODED = f"{_ON_POLICY}test_the_action_is_what_the_base_makes_of_that_noise"
_DENSITY = "tests/policies/test_likelihoods.py::test_densities_entropies_and_kl_are_those_of_torch[latent noise]"
_ALIASED = f"{_ON_DSRL}test_the_aliased_target_by_hand"
_GRADIENT = f"{_ON_DSRL}test_the_actor_s_gradient_by_hand"
_DISTILLED = f"{_ON_DSRL}test_noise_critics_equal_action_critics_after_the_decoder"
_REFIT = f"{_ON_GORL}test_the_refit_maps_the_prior_to_what_was_executed"
_STAGES = f"{_ON_GORL}test_a_refit_ends_every_stage_but_the_last"
_PROCESSES = f"{_ON_GORL}test_two_processes_that_share_the_environments_end_with_the_weights_of_one"
_DSRL_RESUMED = f"{_ON_DSRL}test_a_resumed_run_is_bit_identical"
_GORL_RESUMED = f"{_ON_GORL}test_a_run_resumed_in_the_middle_of_a_stage_is_bit_identical"

_POLICIES = (
    Fault(
        "a decoded chunk is not clipped",
        _POLICY,
        "deterministic(field, w).clamp(-1.0, 1.0)",
        "deterministic(field, w)",
        (_DECODED,),
    ),
    Fault(
        "the noise is not scaled",
        _POLICY,
        "self._action_out(features, self.config.magnitude * choice, logprob)",
        "self._action_out(features, choice, logprob)",
        (f"{_ON_POLICY}test_the_density_of_a_sample_is_that_of_the_squashed_normal",),
    ),
    Fault(
        "critics get unscaled noise",
        _POLICY,
        "sample.flatten(1) / self.config.magnitude",
        "sample.flatten(1)",
        (f"{_ON_POLICY}test_golden_density",),
    ),
    Fault(
        "what is deployed is drawn",
        _POLICY,
        'if mode == "eval":',
        'if mode == "mean":',
        (f"{_ON_POLICY}test_deployed_is_the_mean_without_any_chance",),
    ),
    Fault("the density of noise without log sigma", _POLICY, "z.square() - std.log()", "z.square()", (_DENSITY,)),
    Fault(
        "the density of noise is a mean", _POLICY, "math.pi)).sum(-1, dtype", "math.pi)).mean(-1, dtype", (_DENSITY,)
    ),
    Fault(
        "the encoder begins narrow",
        _POLICY,
        "config.head, std=1.0)",
        "config.head, std=0.5)",
        (f"{_ON_POLICY}test_the_gaussian_begins_as_the_imitation_policy",),
    ),
    Fault(
        "a restart keeps sigma",
        _POLICY,
        "(self.actor.last.weight, self.actor.last.bias, self.actor.log_std)",
        "(self.actor.last.weight, self.actor.last.bias)",
        (f"{_ON_POLICY}test_restart_is_the_prior_again_and_only_the_actor_is_trainable",),
    ),
)

_SOFT = (
    Fault(
        "demonstrations train critics of noise",
        _DSRL,
        "unknown = batch.intervened | no_sample",
        "unknown = batch.intervened",
        (f"{_ON_DSRL}test_critics_of_noise_refuse_what_has_none",),
    ),
    Fault(
        "interventions train critics of noise",
        _DSRL,
        "unknown = batch.intervened | no_sample",
        "unknown = no_sample",
        (f"{_ON_DSRL}test_critics_of_noise_refuse_what_has_none",),
    ),
)

_NOISE_ALIASED = (
    Fault(
        "the critic of noise is forgotten",
        _DSRL,
        'for name in ("noise_critic", "noise_optimizer"):',
        'for name in ("noise_optimizer",):',
        (_DSRL_RESUMED,),
    ),
    Fault(
        "the aliased target evaluates noise",
        _DSRL,
        "self.min_target_q(batch.next_features, action)",
        "self.min_target_q(batch.next_features, noise)",
        (_ALIASED,),
    ),
    Fault(
        "the aliased target decodes unscaled noise",
        _DSRL,
        "self.policy.decode(batch.next_features, self.policy.config.magnitude * noise)",
        "self.policy.decode(batch.next_features, noise)",
        (_ALIASED,),
    ),
    Fault(
        "the aliased target decodes in the present",
        _DSRL,
        "self.policy.decode(batch.next_features,",
        "self.policy.decode(batch.features,",
        (_ALIASED,),
    ),
    Fault(
        "distilled without the decoder",
        _DSRL,
        "self.critic(features, self.policy.decode(dict(features), w))",
        "self.critic(features, w)",
        (_DISTILLED,),
    ),
    Fault(
        "noise critics see unscaled noise",
        _DSRL,
        "self.noise_critic(features, w / magnitude)",
        "self.noise_critic(features, w)",
        (_DISTILLED,),
    ),
    Fault(
        "every noise critic learns the mean",
        _DSRL,
        "self.policy.decode(dict(features), w))",
        "self.policy.decode(dict(features), w)).mean(0)",
        (_DISTILLED,),
    ),
    Fault(
        "distilled where the actor cannot go",
        _DSRL,
        "w = drawn.clamp(-magnitude, magnitude)",
        "w = drawn",
        (f"{_ON_DSRL}test_distillation_is_at_noise_that_the_actor_can_choose_its_bounds_included",),
    ),
    Fault(
        "the aliased actor follows the critic of actions",
        _DSRL,
        "self.noise_critic(features, action).mean(0)",
        "self.critic(features, action).mean(0)",
        (_GRADIENT,),
    ),
    Fault(
        "critics of actions get noise",
        _DSRL,
        "return self.policy.normalized(batch.executed)",
        "return super().critic_action(batch)",
        (f"{_ON_DSRL}test_critics_get_noise_and_actions",),
    ),
    Fault(
        "noise critics see other inputs",
        _DSRL,
        "[*super().input_normalizers(), self.noise_critic]",
        "super().input_normalizers()",
        (f"{_ON_DSRL}test_noise_critics_have_the_critics_input_statistics",),
    ),
)

_TURNS = (
    Fault(
        "the penalty is smallest at sigma 0",
        _GORL,
        "std.square() - 1.0 - 2.0 * std.log()",
        "std.square()",
        (f"{_ON_GORL}test_the_penalty_is_the_kl_to_the_prior_and_0_at_the_prior",),
    ),
    Fault(
        "the penalty is a mean",
        _GORL,
        ".flatten(1).sum(1)",
        ".flatten(1).mean(1)",
        (f"{_ON_GORL}test_the_penalty_is_the_kl_to_the_prior_and_0_at_the_prior",),
    ),
    Fault(
        "the penalty is a reward",
        _GORL,
        "loss + self.config.prior",
        "loss - self.config.prior",
        (f"{_ON_GORL}test_the_loss_is_ppo_s_and_the_penalty",),
    ),
    Fault(
        "the decoder is fitted from the noise that was chosen",
        _GORL,
        "flow_matching_errors(velocity, chunks[chosen], noise[chosen], time[chosen])",
        "flow_matching_errors(velocity, chunks[chosen], 2.0 + noise[chosen], time[chosen])",
        (_REFIT,),
    ),
    Fault(
        "the decoder is fitted to what was chosen",
        _GORL,
        "rollout.executed.flatten(0, 1)",
        "rollout.sample.flatten(0, 1)",
        (_REFIT,),
    ),
    Fault(
        "idle decisions are learnt",
        _GORL,
        "rollout.terminated.shape), rollout.valid)",
        "rollout.terminated.shape), torch.ones_like(rollout.valid))",
        (f"{_ON_GORL}test_actions_that_were_not_executed_are_not_learnt",),
    ),
    Fault("the encoder is not reset", _GORL, "self.policy.restart()", "pass", (_STAGES,)),
    Fault("the optimizer is not reset", _GORL, "self.optimizer.state.clear()", "pass", (_STAGES,)),
    Fault(
        "a stage's actions stay for the next",
        _GORL,
        "self.stage + 1, 0, []",
        "self.stage + 1, 0, self.window",
        (_STAGES,),
    ),
    Fault("the last stage ends as well", _GORL, "self.stage + 1 < self.config.stages", "True", (_STAGES,)),
    Fault(
        "the best is kept without its decoder",
        _GORL,
        'self.parameters |= {f"decoder.{name}": parameter for name, parameter in self.decoder.items()}',
        "pass",
        (f"{_ON_GORL}test_the_best_weights_include_the_decoder",),
    ),
    Fault(
        "a refit's gradient stays",
        _GORL,
        "        optimizer.zero_grad(set_to_none=True)",
        "        pass",
        (f"{_ON_GORL}test_ppo_leaves_the_decoder_and_the_refit_leaves_the_encoder",),
    ),
    Fault(
        "every process counts as all",
        _GORL,
        "yield share * part * (losses",
        "yield part * (losses",
        (_PROCESSES,),
    ),
    Fault(
        "all processes draw the same noise",
        _GORL,
        "noise = normal((total, chunks.shape[1]), self.generator, like=chunks)[local]",
        "noise = normal((total, chunks.shape[1]), self.generator, like=chunks)[: len(chunks)]",
        (_PROCESSES,),
    ),
    Fault(
        "the window is forgotten",
        _GORL,
        'self.window = [_Window(**part) for part in state["window"]]',
        "pass",
        (_GORL_RESUMED,),
    ),
)

FAULTS = (*_POLICIES, *_SOFT, *_NOISE_ALIASED, *_TURNS)
