"""Faults in the diffusion policy, in DPPO and in the imitation of demonstrations."""

from __future__ import annotations

from tests.mutants.fault import Fault

_STEPS, _POLICY = "vla_rl/policies/diffusion_steps.py", "vla_rl/policies/diffusion.py"
_DPPO = "vla_rl/algorithms/dppo.py"
_ON, _ON_DPPO = "tests/policies/test_diffusion.py::", "tests/algorithms/test_dppo.py::"
_DIFFUSERS = f"{_ON}test_chains_are_those_of_diffusers"
_TORCH = "tests/policies/test_likelihoods.py::test_densities_entropies_and_kl_are_those_of_torch[diffusion ddim]"
_DENSITY = (
    "tests/policies/test_likelihoods.py::test_every_ratio_is_one_before_the_first_update[fp64-diffusion ddim, last two]"
)
_DEPLOYED = f"{_ON}test_what_is_deployed_is_ddim_without_noise_or_ddpm_without_floor"
_LOSS = f"{_ON}test_the_loss_is_that_of_the_cosine_schedule_by_hand"
_HAND = f"{_ON_DPPO}test_the_clipped_objective_by_hand"
_GRADIENT = f"{_ON_DPPO}test_without_discount_the_gradient_is_that_of_the_chain"

_CHAINS = (
    Fault(
        "a diffusion step's std is its variance",
        _STEPS,
        "(1 - alpha / after)).sqrt()",
        "(1 - alpha / after))",
        (_DIFFUSERS,),
    ),
    Fault(
        "a diffusion step forgets the noise it will add",
        _STEPS,
        "(1 - after - std**2).clamp_min(0).sqrt()",
        "(1 - after).sqrt()",
        (_DIFFUSERS,),
    ),
    Fault(
        "the noise is not taken from the clipped estimate",
        _STEPS,
        "mean = on_x0 * x0 + on_x * x",
        "mean = on_x0 * x0 + on_x * (x + (from_x * x + from_network * output - x0))",
        (_DIFFUSERS,),
    ),
    Fault(
        "the estimate of a diffusion is not clipped",
        _STEPS,
        ".clamp(-self.process.clip, self.process.clip)",
        ".clamp(-1e9, 1e9)",
        (_DIFFUSERS,),
    ),
    Fault(
        "the sign of v",
        _STEPS,
        "alpha.sqrt(), -(1 - alpha).sqrt()",
        "alpha.sqrt(), (1 - alpha).sqrt()",
        (_DIFFUSERS,),
    ),
    Fault(
        "the first timestep is not pure noise",
        _STEPS,
        '"timestep_spacing": "trailing",',
        '"timestep_spacing": "leading",',
        (_DIFFUSERS,),
    ),
    Fault(
        "the network gets another timestep than in training",
        _STEPS,
        "time = scheduler.timesteps.double() / process.timesteps",
        "time = (scheduler.timesteps.double() + 1) / process.timesteps",
        (_DIFFUSERS,),
    ),
    Fault(
        "the floor is in the likelihood's steps only",
        _STEPS,
        "self._denoise(self.table, early, late, noise, generator)",
        "self._denoise(self.deployed_table, early, late, noise, generator)",
        (_DIFFUSERS, _DENSITY),
    ),
    Fault(
        "the floor is added to the std",
        _STEPS,
        "std.clamp_min(floor))",
        "std + floor)",
        (f"{_ON}test_the_floor_lifts_every_std_and_leaves_the_means",),
    ),
    Fault(
        "what is deployed keeps the floor",
        _STEPS,
        "self.reverse.deployed, 0.0)",
        "self.reverse.deployed, self.floor)",
        (_DEPLOYED,),
    ),
    Fault(
        "the likelihood is of the first steps",
        _STEPS,
        "points[:, :-1], slice(self.steps - self.fine_tuned, self.steps))",
        "points[:, :-1], slice(0, self.fine_tuned))",
        (_DENSITY,),
    ),
    Fault(
        "the fine-tuned steps begin one too late",
        _STEPS,
        "network = late if k >= self.steps - self.fine_tuned else early",
        "network = late if k > self.steps - self.fine_tuned else early",
        (f"{_ON}test_the_first_steps_keep_the_network_of_imitation", f"{_ON}test_score_gradient_is_the_true_one"),
    ),
    Fault(
        "a step's log-prob is a mean",
        _STEPS,
        "0.5 * math.log(2.0 * math.pi)).sum(-1,",
        "0.5 * math.log(2.0 * math.pi)).mean(-1,",
        (_TORCH, _GRADIENT),
    ),
    Fault(
        "a chain's log-prob is a mean over its steps",
        _POLICY,
        "self.step_logprob(aux, params).sum(1)",
        "self.step_logprob(aux, params).mean(1)",
        (_TORCH,),
    ),
)
_POLICIES = (
    Fault(
        "the first steps' copy is taken again",
        _POLICY,
        ' and "early" not in self.heads:',
        ":",
        (f"{_ON}test_the_first_steps_keep_the_network_of_imitation",),
    ),
    Fault(
        "the first steps learn too",
        _POLICY,
        'if name.startswith("heads.late.")',
        'if name.startswith("heads.")',
        (f"{_ON}test_the_first_steps_keep_the_network_of_imitation",),
    ),
    Fault(
        "the observation encoder's weights are saved twice",
        _POLICY,
        'config, self.heads.state_dict(), inside={"encoder": self.encoder}',
        'config, self.state_dict(), inside={"encoder": self.encoder}',
        (f"{_ON}test_a_checkpoint_restores_the_same_policy_with_its_encoder",),
    ),
    Fault(
        "a diffusion policy of another environment is accepted",
        _POLICY,
        'from_pretrained(Path(folder) / "encoder", spec)',
        'from_pretrained(Path(folder) / "encoder")',
        (f"{_ON}test_a_checkpoint_restores_the_same_policy_with_its_encoder",),
    ),
    Fault(
        "the noisiest timestep is never learnt",
        _POLICY,
        "integers(process.timesteps, (len(target),)",
        "integers(process.timesteps - 1, (len(target),)",
        (f"{_ON}test_every_chunk_is_drawn_with_several_noises_and_all_timesteps",),
    ),
    Fault(
        "noise and v are exchanged in imitation",
        _STEPS,
        'noise if process.prediction == "epsilon" else',
        'noise if process.prediction != "epsilon" else',
        (_LOSS,),
    ),
)
_ALGORITHM = (
    Fault(
        "the last denoising step is discounted most",
        _DPPO,
        "self.config.gamma_denoise ** (steps - 1 - k)",
        "self.config.gamma_denoise ** k",
        (_HAND, f"{_ON_DPPO}test_noisier_steps_are_discounted_more"),
    ),
    Fault(
        "a discount for the last denoising step",
        _DPPO,
        "self.config.gamma_denoise ** (steps - 1 - k)",
        "self.config.gamma_denoise ** (steps - k)",
        (_HAND,),
    ),
    Fault(
        "denoising steps are averaged",
        _DPPO,
        "loss, clipped = loss - (minibatch.weight * objective).mean(), clipped + outside / steps",
        "loss, clipped = loss - (minibatch.weight * objective).mean() / steps, clipped + outside / steps",
        (_HAND, _GRADIENT),
    ),
    Fault(
        "clip bounds narrow along the chain",
        _DPPO,
        "math.expm1(rate * k / (steps - 1))",
        "math.expm1(rate * (steps - 1 - k) / (steps - 1))",
        (f"{_ON_DPPO}test_clip_bounds_are_the_golden_ones",),
    ),
    Fault(
        "the clip schedule counts K' intervals",
        _DPPO,
        "math.expm1(rate * k / (steps - 1))",
        "math.expm1(rate * k / steps)",
        (f"{_ON_DPPO}test_clip_bounds_are_the_golden_ones",),
    ),
    Fault(
        "one ratio for the whole chain",
        _DPPO,
        "ratio = (self.policy.step_logprob(minibatch.aux, new.params) - minibatch.logprob).exp()",
        "ratio = (self.policy.step_logprob(minibatch.aux, new.params) - minibatch.logprob).mean(1, keepdim=True).exp()",
        (_HAND,),
    ),
    Fault(
        "steps are anchored at their present log-prob",
        _DPPO,
        "- minibatch.logprob).exp()",
        "- self.policy.step_logprob(minibatch.aux, new.params).detach()).exp()",
        (_HAND,),
    ),
    Fault(
        "steps are anchored at the recorded joint log-prob",
        _DPPO,
        "metrics), logprob=steps)",
        "metrics), logprob=batch.logprob[:, None] / steps.shape[1])",
        (f"{_ON_DPPO}test_every_steps_ratio_is_one_before_the_first_update_and_not_after",),
    ),
)

FAULTS = (*_CHAINS, *_POLICIES, *_ALGORITHM)
