"""Faults in the generators that policies draw their noise from."""

from __future__ import annotations

from tests.mutants.fault import Fault

_NOISE, _RUN = "vla_rl/policies/noise.py", "vla_rl/evaluation/run.py"
_TINY, _INPUTS = "tests/policies/test_tiny.py::", "tests/policies/test_inputs.py::"
_DRAWS = "tests/policies/test_noise.py::"
_EVALUATION = "tests/evaluation/test_run.py::"
_NEIGHBOURS = f"{_EVALUATION}test_an_outcome_does_not_depend_on_the_environments_beside_it_or_on_the_order"

FAULTS = (
    Fault(
        "all environments draw from the first one's generator",
        _NOISE,
        "for own in generator])",
        "for own in [generator[0]] * len(generator)])",
        (f"{_DRAWS}test_the_noise_of_an_environment_does_not_depend_on_its_neighbours", _NEIGHBOURS),
    ),
    Fault(
        "selected environments draw from the first generators",
        _NOISE,
        "[generator[i] for i in env_ids.cpu().tolist()]",
        "list(generator[: len(env_ids)])",
        (f"{_DRAWS}test_some_rows_keep_their_generators",),
    ),
    Fault(
        "noise of double precision is drawn in single precision",
        _NOISE,
        "torch.randn(size, generator=own, device=own.device, dtype=dtype)",
        "torch.randn(size, generator=own, device=own.device, dtype=torch.float32)",
        (f"{_DRAWS}test_one_generator_draws_as_torch_does",),
    ),
    Fault(
        "annealing forgets all but the first kind of noise",
        "vla_rl/policies/flow.py",
        "for name in magnitudes}",
        "for name in magnitudes[:1]}",
        ("tests/policies/test_flow.py::test_less_noise_is_less_of_every_kind_of_noise",),
    ),
    Fault(
        "noise given as an int is not annealed",
        "vla_rl/policies/flow.py",
        'if item.type in (float, "float")]',
        "if isinstance(getattr(self.schedule, item.name), float)]",
        ("tests/policies/test_flow.py::test_less_noise_is_less_of_every_kind_of_noise",),
    ),
    Fault(
        "one random step is the rank among the noisy ones",
        "vla_rl/policies/flow.py",
        "return torch.tensor(table.noisy, dtype=torch.int64)[choice]",
        "return choice",
        ("tests/policies/test_flow.py::test_one_random_step_is_the_step_and_not_its_rank_among_the_noisy_ones",),
    ),
    Fault(
        "the fine-tuned network takes the first steps when deployed",
        "vla_rl/policies/diffusion.py",
        "self.sampler.deployed(early, late, noise, generator)",
        "self.sampler.deployed(late, late, noise, generator)",
        (
            "tests/policies/test_diffusion.py::"
            "test_what_is_deployed_takes_its_first_steps_with_the_network_of_imitation",
        ),
    ),
    Fault(
        "the noise of a flow does not fall",
        "vla_rl/policies/flow_policy.py",
        "self.config.sampler.scaled(1.0 + (self.final_noise - 1.0) * progress)",
        "self.config.sampler.scaled(self.final_noise**0)",
        (
            "tests/policies/test_tiny.py::"
            "test_noise_falls_with_the_progress_of_the_run_and_stays_in_the_checkpoint_as_it_was_chosen",
        ),
    ),
    Fault(
        "the noise of a diffusion falls twice",
        "vla_rl/policies/diffusion.py",
        "self.sampler = self.config.sampler.scaled(",
        "self.sampler = self.sampler.scaled(1.0 + (self.final_noise - 1.0) * progress).scaled(",
        ("tests/policies/test_diffusion.py::test_noise_falls_with_the_progress_of_the_run",),
    ),
    Fault(
        "an episode's noise follows from its environment",
        _RUN,
        "episode_generator(self.noise_seed, int(self.seeds[self.playing[env_id]]))",
        "episode_generator(self.noise_seed, int(env_id))",
        (_NEIGHBOURS,),
    ),
    Fault(
        "the seed of an evaluation's noise is ignored",
        _RUN,
        "np.random.SeedSequence([noise_seed, episode_seed])",
        "np.random.SeedSequence([episode_seed])",
        (f"{_EVALUATION}test_another_noise_seed_is_other_noise",),
    ),
    Fault(
        "cameras are taken in the order of the spec",
        "vla_rl/policies/tiny.py",
        "for name in sorted(self.spec.images)",
        "for name in self.spec.images",
        (f"{_TINY}test_cameras_are_distinguished_by_name_and_not_by_their_order",),
    ),
    Fault(
        "a flow may have no step",
        "vla_rl/policies/flow.py",
        "check_limits(self, steps=(1, math.inf), temperature=(0, math.inf))",
        "check_limits(self, steps=(0, math.inf), temperature=(0, math.inf))",
        (f"{_TINY}test_a_checkpoint_without_steps_is_refused",),
    ),
    Fault(
        "the mean of no word is divided by 0",
        "vla_rl/policies/backbone.py",
        ".sum(1, keepdim=True).clamp_min(1)",
        ".sum(1, keepdim=True)",
        (f"{_TINY}test_an_empty_instruction_gives_finite_actions_and_changes_no_other",),
    ),
    Fault(
        "words are Latin",
        "vla_rl/policies/tokens.py",
        'elif unicodedata.category(character)[0] in "LMN":',
        "elif character.isascii() and character.isalnum():",
        (f"{_INPUTS}test_instructions_of_any_script_are_read",),
    ),
    Fault(
        "marks part words",
        "vla_rl/policies/tokens.py",
        'unicodedata.category(character)[0] not in "LMN"',
        'unicodedata.category(character)[0] not in "LN"',
        (f"{_INPUTS}test_instructions_of_any_script_are_read",),
    ),
    Fault(
        "a long instruction does not fit its own vocabulary",
        "vla_rl/policies/tokens.py",
        "max([length, *map(len, split)])",
        "length",
        (f"{_INPUTS}test_the_longest_instruction_decides_the_length",),
    ),
)
