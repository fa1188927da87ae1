"""Faults in the tabletop on MuJoCo-Warp and in causes of ends as codes."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ENV, _WORLDS, _CAMERAS = (f"sims/warp/{name}.py" for name in ("env", "worlds", "cameras"))
_ROWS, _ON = "vla_rl/contract/rows.py", "tests/sims/test_warp.py::"
_CODES = "tests/contract/test_rows.py::test_causes_are_codes_that_behave_as_a_tuple_of_strings"

FAULTS = (
    Fault(
        "ended worlds of Warp go on moving",
        _ENV,
        "worlds.put_back(before, ~(running & sound))",
        "worlds.put_back(before, ~sound)",
        (f"{_ON}test_the_expert_lifts_the_same_cubes_at_the_same_time",),
    ),
    Fault(
        "a diverged world of Warp keeps its state",
        _ENV,
        "worlds.put_back(before, ~(running & sound))",
        "worlds.put_back(before, ~running)",
        (f"{_ON}test_a_world_that_diverges_or_finds_no_room_for_contacts_ends_alone",),
    ),
    Fault(
        "a diverged world of Warp can succeed",
        _ENV,
        "torch.where(sound, torch.where(result.success, SUCCESS, cause), DIVERGED)",
        "torch.where(result.success, SUCCESS, torch.where(sound, cause, DIVERGED))",
        (f"{_ON}test_a_world_that_diverges_or_finds_no_room_for_contacts_ends_alone",),
    ),
    Fault(
        "lost contacts in Warp are not noticed",
        _WORLDS,
        "return finite & ((self._overflow & int(_LOST)) == 0)",
        "return finite",
        (f"{_ON}test_a_world_that_diverges_or_finds_no_room_for_contacts_ends_alone",),
    ),
    Fault(
        "Warp simulates one step of physics less",
        _WORLDS,
        "for _ in range(self._substeps):",
        "for _ in range(self._substeps - 1):",
        (f"{_ON}test_an_episode_begins_as_on_mujoco_and_stays_within_1e_4_until_something_is_touched",),
    ),
    Fault(
        "pictures of Warp are blue where they are red",
        _CAMERAS,
        "bgra[:, i, ..., :3].flip(-1)",
        "bgra[:, i, ..., :3].clone()",
        (f"{_ON}test_pictures_show_what_mujoco_shows",),
    ),
    Fault(
        "pictures of Warp show the state before",
        _CAMERAS,
        "mjw.kinematics(model, data)",
        "pass",
        (f"{_ON}test_pictures_show_what_mujoco_shows",),
    ),
    Fault(
        "marks on Warp lie where the model has them",
        _CAMERAS,
        "positions.to(self._geoms.dtype)",
        "self._geoms[:, self._placed]",
        (f"{_ON}test_pictures_show_what_mujoco_shows",),
    ),
    Fault(
        "what follows from a mass is that of the nominal one on Warp",
        _WORLDS,
        'self._scale("dof_invweight0", env_ids, dofs, 1 / mass)',
        'self._scale("dof_invweight0", env_ids, dofs, mass)',
        (f"{_ON}test_masses_and_friction_are_those_of_mujoco_in_every_world",),
    ),
    Fault(
        "a restore on Warp forgets the colours",
        _ENV,
        'arrays() | {"parameters": self._parameters} | tensors',
        'arrays() | {"parameters": self._parameters.copy()} | tensors',
        (f"{_ON}test_episodes_with_parameters_are_those_of_mujoco_and_go_on_after_a_restore",),
    ),
    Fault(
        "as many environments on Warp as one likes",
        "sims/device_memory.py",
        "if num_envs * each > SHARE * free:",
        "if num_envs * each < 0:",
        (f"{_ON}test_too_many_environments_are_refused_before_anything_is_made",),
    ),
    Fault(
        "codes of causes are compared without their tables",
        _ROWS,
        "isinstance(other, Causes) and other.table == self.table",
        "isinstance(other, Causes)",
        (_CODES,),
    ),
    Fault(
        "the causes of a step change with the next one",
        _ROWS,
        "Causes(self.cause.copy(), self.causes)",
        "Causes(self.cause, self.causes)",
        ("tests/contract/test_rows.py::test_the_causes_of_a_step_stay_as_they_were",),
    ),
)
