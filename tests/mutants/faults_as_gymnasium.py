"""Faults in our environments as Gymnasium's."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ENV, _SPACES = "sims/as_gymnasium.py", "sims/as_gymnasium_spaces.py"
_ON = "tests/sims/test_as_gymnasium.py::"
_NATIVE = f"{_ON}test_native_rows_play_what_single_environments_play"
_SCALED = f"{_ON}test_actions_are_scaled_unless_physical_ones_are_wanted"

_AS_SINGLE = "tests/sims/test_as_sb3.py::test_it_gets_what_it_gets_from_single_environments"

FAULTS = (
    Fault(
        "rows restart in the step after the one that Gymnasium means",
        _ENV,
        "AutoresetMode.SAME_STEP: ended,  # after it",
        "AutoresetMode.SAME_STEP: idle,",
        (_NATIVE,),
    ),
    Fault(
        "a row without autoreset is stepped after its end",
        _ENV,
        "if self.autoreset_mode == AutoresetMode.DISABLED and idle.any():",
        "if self.autoreset_mode == AutoresetMode.DISABLED and idle.all() and not len(idle):",
        (f"{_ON}test_a_row_that_ended_is_not_stepped_without_autoreset",),
    ),
    Fault(
        "Gymnasium is shown the next episode's first observation as the last one",
        _ENV,
        "final[env_id] = self.view.row(step.obs, int(env_id))",
        "final[env_id] = self.view.row(self.env.reset([], []), 0)",
        (_NATIVE,),
    ),
    Fault(
        "every row has the same seed",
        _ENV,
        "seed = [None if seed is None else int(seed) + i for i in range(self.num_envs)]",
        "seed = [None if seed is None else int(seed) + 0 * i for i in range(self.num_envs)]",
        (_NATIVE,),
    ),
    Fault(
        "later episodes of a row repeat its first one",
        _ENV,
        "chosen.append(next_seed(self._generators[env_id]) if seed is None else seed)",
        "chosen.append(0 if seed is None else seed)",
        (_NATIVE,),
    ),
    Fault(
        "a seed is not the one that we play",
        _ENV,
        "self._obs = self.env.reset([0], [next_seed(self.np_random) if seed is None else seed])",
        "self._obs = self.env.reset([0], [next_seed(self.np_random)])",
        (f"{_ON}test_a_seed_is_ours",),
    ),
    Fault(
        "an episode is a step longer than it may be",
        _ENV,
        "late = (step.obs.time >= self._limit) & ~step.terminated",
        "late = (step.obs.time > self._limit) & ~step.terminated",
        (_NATIVE,),
    ),
    Fault(
        "the potential itself is added instead of its increase",
        _ENV,
        "shaped = step.reward[:, 0] + self._potential(step.obs) - self._potential(self._obs)",
        "shaped = step.reward[:, 0] + self._potential(step.obs)",
        (f"{_ON}test_the_increase_of_a_potential_is_added_to_the_reward",),
    ),
    Fault(
        "what only critics may see is shown to everybody",
        _SPACES,
        "if privileged or not name.startswith(PRIVILEGED):",
        "if name:",
        (f"{_ON}test_what_is_seen_and_what_is_not",),
    ),
    Fault(
        "actions are scaled to half of their range",
        _SPACES,
        "self._offset, self._scale = (low + high) / 2, (high - low) / 2",
        "self._offset, self._scale = (low + high) / 2, (high - low) / 4",
        (_SCALED,),
    ),
    Fault(
        "Stable-Baselines3 takes the first observation of the next episode for the last",
        "sims/as_sb3.py",
        '{"terminal_observation": infos["final_obs"][i], ',
        '{"terminal_observation": {name: part[i] for name, part in obs.items()}, ',
        (_AS_SINGLE,),
    ),
    Fault(
        "Stable-Baselines3 does not see the time limit",
        "sims/as_sb3.py",
        '"TimeLimit.truncated": bool(truncated[i])}',
        '"TimeLimit.truncated": False}',
        (_AS_SINGLE,),
    ),
    Fault(
        "Stable-Baselines3's seeds are not those of its first episodes",
        "sims/as_sb3.py",
        "obs, _ = self.env.reset(seed=seeds)",
        "obs, _ = self.env.reset(seed=seeds and seeds[::-1])",
        (_AS_SINGLE,),
    ),
    Fault(
        "pictures that are too small are read",
        "vla_rl/policies/image_encoder.py",
        "if min(spec.images[name].shape[:2]) < 16:",
        "if min(spec.images[name].shape[:2]) < 4:",
        ("tests/policies/test_categorical.py::test_cameras_that_cannot_be_read_are_refused",),
    ),
)
