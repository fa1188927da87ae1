"""Faults in what policies draw, and for whom."""

from __future__ import annotations

from tests.mutants.fault import Fault

_NOISE, _RUN = "vla_rl/policies/noise.py", "vla_rl/evaluation/run.py"
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
        "some rows draw from the first generators",
        _NOISE,
        "[generator[i] for i in env_ids.tolist()]",
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
        "an episode's noise follows from its environment",
        _RUN,
        "_episode_generator(self.noise_seed, int(self.seeds[self.playing[env_id]]))",
        "_episode_generator(self.noise_seed, int(env_id))",
        (_NEIGHBOURS,),
    ),
    Fault(
        "the seed of an evaluation's noise is ignored",
        _RUN,
        "np.random.SeedSequence([noise_seed, episode_seed])",
        "np.random.SeedSequence([episode_seed])",
        (f"{_EVALUATION}test_another_noise_seed_is_other_noise",),
    ),
)
