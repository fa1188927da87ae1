"""Faults in randomised environments: what is drawn, what it does to the scene, late and noisy actions, records."""

from __future__ import annotations

from tests.mutants.fault import Fault

_DRAWS, _WRAPPER, _LOOKS = "vla_rl/contract/randomization.py", "sims/randomize.py", "sims/mujoco/looks.py"
_PHYSICS, _TABLE, _ENV, _CATALOG = (
    "sims/mujoco/physics.py",
    "sims/mujoco/tabletop.py",
    "sims/mujoco/env.py",
    "sims/catalog.py",
)
_GANTRY = "sims/mujoco/gantry.py"
_ON_GYM = "tests/sims/test_gym_physics.py::"
_ON_DRAWS, _ON_SIMS = "tests/contract/test_randomization.py::", "tests/sims/test_randomize.py::"
_ALONE = f"{_ON_DRAWS}test_an_episode_keeps_its_values_whatever_else_is_varied_and_whoever_is_beside_it"
_EQUAL = f"{_ON_DRAWS}test_whole_numbers_and_choices_are_equally_likely_with_both_ends"
_ALLOWED = f"{_ON_DRAWS}test_what_an_environment_does_not_allow_is_refused_in_one_sentence"
_LATE = f"{_ON_SIMS}test_late_commands_are_executed_after_zeros_however_they_are_cut_into_chunks"
_NOISE = f"{_ON_SIMS}test_noise_has_the_stated_deviation_and_is_that_of_the_seed_and_the_time"
_SAVED = f"{_ON_SIMS}test_a_snapshot_takes_parameters_noise_and_late_commands_to_another_environment"
_NOMINAL = f"{_ON_SIMS}test_nominal_values_change_nothing_bit_for_bit"
_AGAIN = f"{_ON_SIMS}test_what_was_varied_is_nominal_again_in_the_next_episode"
_MODELS = f"{_ON_SIMS}test_masses_and_friction_belong_to_their_environment"
_FRAME = f"{_ON_SIMS}test_cameras_move_and_turn_in_their_own_frame"
_LIGHT = f"{_ON_SIMS}test_light_and_table_are_as_bright_as_they_say"
_LOOKED = f"{_ON_SIMS}test_looks_change_the_picture_and_nothing_else"
_START = f"{_ON_SIMS}test_the_gripper_starts_elsewhere_but_within_its_workspace"
_WRAPPED = f"{_ON_SIMS}test_expert_scenes_claims_and_swapped_instruction_are_those_of_the_wrapped_environment"

FAULTS = (
    Fault(
        "all parameters of an episode are drawn alike",
        _DRAWS,
        "np.random.SeedSequence([seed, zlib.crc32(name.encode())])",
        "np.random.SeedSequence([seed, 0])",
        (_ALONE,),
    ),
    Fault(
        "the largest whole number is never drawn",
        _DRAWS,
        "rng.integers(int(self.low), int(self.high) + 1)",
        "rng.integers(int(self.low), int(self.high))",
        (_EQUAL,),
    ),
    Fault(
        "the upper bound of a range is not checked",
        _DRAWS,
        "parameter.check(self.high)",
        "parameter.check(self.low)",
        (_ALLOWED,),
    ),
    Fault(
        "an unknown parameter is ignored",
        _DRAWS,
        "for name, distribution in self.distributions.items():",
        "for name, distribution in ((n, d) for n, d in self.distributions.items() if n in known):",
        (_ALLOWED,),
    ),
    Fault(
        "whole numbers are not required",
        "vla_rl/contract/parameter.py",
        "whole = not self.integer or float(value).is_integer()",
        "whole = True",
        (_ALLOWED,),
    ),
    Fault(
        "a command arrives one step early",
        _WRAPPER,
        "queue = np.concatenate([self._pending[rows, :delay], command[rows]], axis=1)",
        "queue = np.concatenate([self._pending[rows, 1:delay], command[rows], command[rows, -1:]], axis=1)",
        (_LATE,),
    ),
    Fault(
        "late commands of a chunk are lost",
        _WRAPPER,
        "action[rows], self._pending[rows, :delay] = queue[:, :horizon], queue[:, horizon:]",
        "action[rows] = queue[:, :horizon]",
        (_LATE,),
    ),
    Fault(
        "what was executed late counts as what was commanded",
        _WRAPPER,
        "executed=np.where(as_commanded, command, step.executed)",
        "executed=step.executed",
        (_LATE,),
    ),
    Fault(
        "noise is scaled by the whole range",
        _WRAPPER,
        "self._half_range = (high - low) / 2",
        "self._half_range = high - low",
        (_NOISE,),
    ),
    Fault(
        "every action of an episode has the same noise",
        _WRAPPER,
        "when = np.minimum(self._book.time[rows, None] + np.arange(horizon), self.spec.time_limit - 1)",
        "when = np.zeros((rows.size, horizon), int)",
        (_NOISE,),
    ),
    Fault(
        "a restored environment keeps its own noise",
        _WRAPPER,
        "self._draw_noise(index)  # it follows from the seeds",
        "pass",
        (_SAVED,),
    ),
    Fault(
        "late commands are not part of a snapshot",
        _WRAPPER,
        'own = {"values": self._values, "pending": self._pending, **self._book.arrays()}',
        'own = {"values": self._values, **self._book.arrays()}',
        (_SAVED,),
    ),
    Fault(
        "the record is that of the first environment",
        _WRAPPER,
        "RANDOMIZATION: self._values.astype(np.float32)}",
        "RANDOMIZATION: np.repeat(self._values[:1], self.num_envs, axis=0).astype(np.float32)}",
        (f"{_ON_SIMS}test_the_observation_records_what_was_drawn_from_the_seed",),
    ),
    Fault(
        "drawn parameters do not reach the simulator",
        _WRAPPER,
        "obs = cast(VariableEnv, self.env).reset(index, seed, given) if given else",
        "obs = self.env.reset(index, seed) if given else",
        (_LOOKED,),
    ),
    Fault(
        "demonstrations do not record the parameters",
        "vla_rl/experience/collect.py",
        "if RANDOMIZATION not in spec.extras:",
        "if RANDOMIZATION in spec.extras:",
        (f"{_ON_SIMS}test_demonstrations_have_a_column_for_every_parameter",),
    ),
    Fault(
        "what can be varied is not shown",
        "vla_rl/recipes/sims.py",
        "return randomize.parameters_of(name, options)",
        "return randomize.ACTION_PARAMETERS",
        ("tests/cli/test_inspect.py::test_an_environment_shows_what_can_be_varied_in_it",),
    ),
    Fault(
        "the next episode keeps masses and friction",
        _ENV,
        "self._set_physics(index, varied=bool(parameters))",
        "self._set_physics(index if parameters else index[:0], varied=bool(parameters))",
        (_AGAIN,),
    ),
    Fault(
        "pictures after a nominal reset look as before",
        _ENV,
        "looks = self._values(env_ids) if self._physics is not None else []",
        "looks = self._values(env_ids) if (self._parameters[env_ids] != parameter_rows(PARAMETERS, {}, env_ids)).any() "
        "else []",
        (_AGAIN,),
    ),
    Fault(
        "a snapshot forgets the parameters",
        _ENV,
        'own = {"physics": self._batch.state, "parameters": self._parameters, **self._book.arrays()}',
        'own = {"physics": self._batch.state, **self._book.arrays()}',
        (_SAVED,),
    ),
    Fault(
        "a restored environment keeps its physics",
        _ENV,
        "self._set_physics(index, varied=not np.array_equal(self._parameters[index], nominal))",
        "self._set_physics(index[:0], varied=not np.array_equal(self._parameters[index], nominal))",
        (_SAVED,),
    ),
    Fault(
        "inertia stays when the mass changes",
        _PHYSICS,
        "self._model.body_inertia[self._movable] * mass[:, None, None]",
        "self._model.body_inertia[self._movable] * np.ones_like(mass)[:, None, None]",
        (_MODELS,),
    ),
    Fault(
        "only the table's friction varies",
        _PHYSICS,
        "self._friction[env_ids] = self._model.geom_friction * values",
        "self._friction[env_ids, :1] = self._model.geom_friction[:1] * values",
        (_MODELS, f"{_ON_SIMS}test_slippery_cubes_cannot_be_lifted_and_the_neighbours_do_not_notice"),
    ),
    Fault(
        "constants derived from the masses stay",
        _PHYSICS,
        "self._batch.set_const(env_ids)",
        "pass",
        (_MODELS,),
    ),
    Fault(
        "physics of all environments is set",
        _PHYSICS,
        "self._friction[env_ids] = self._model",
        "self._friction[:] = self._model",
        (_MODELS,),
    ),
    Fault(
        "the gripper may start outside its workspace",
        _GANTRY,
        "ctrl[:3] = np.clip(moved, WORKSPACE_LOW, WORKSPACE_HIGH)",
        "ctrl[:3] = moved",
        (_START,),
    ),
    Fault(
        "the gripper is commanded back to where it would have started",
        _GANTRY,
        "qpos[GANTRY_QPOS] = ctrl[:3] = np.clip",
        "qpos[GANTRY_QPOS] = np.clip",
        (_START,),
    ),
    Fault(
        "cubes that are away come along",
        _TABLE,
        'for cube in np.flatnonzero(task_state["colour"] != UNSEEN):',
        'for cube in range(len(task_state["colour"])):',
        (f"{_ON_SIMS}test_absent_cubes_stay_absent",),
    ),
    Fault(
        "marks stay where they were",
        _TABLE,
        'task_state["mark_xy"][task_state["mark_colour"] != UNSEEN] += shift',
        'task_state["mark_xy"][task_state["mark_colour"] != UNSEEN] += 0 * shift',
        (f"{_ON_SIMS}test_the_marks_of_place_and_push_are_shifted_with_the_cubes",),
    ),
    Fault(
        "a cube turns by twice the angle",
        _TABLE,
        "cos, sin = np.cos(yaw / 2), np.sin(yaw / 2)",
        "cos, sin = np.cos(yaw), np.sin(yaw)",
        (f"{_ON_SIMS}test_cubes_are_turned",),
    ),
    Fault(
        "cameras move along the world's axes",
        _LOOKS,
        "mujoco.mju_rotVecQuat(moved, shift, self._cam_quat[camera])",
        "moved[:] = shift",
        (_FRAME,),
    ),
    Fault(
        "yaw and pitch are mixed up",
        _LOOKS,
        '(("yaw", (0.0, 1.0, 0.0)), ("pitch", (1.0, 0.0, 0.0))',
        '(("pitch", (0.0, 1.0, 0.0)), ("yaw", (1.0, 0.0, 0.0))',
        (_FRAME,),
    ),
    Fault(
        "cameras turn in the world's frame",
        _LOOKS,
        "mujoco.mju_mulQuat(quaternion, quaternion.copy(), turn)",
        "mujoco.mju_mulQuat(quaternion, turn, quaternion.copy())",
        (_FRAME,),
    ),
    Fault(
        "the field of view is added in radians",
        _LOOKS,
        'np.rad2deg(values["camera_fovy"])',
        'values["camera_fovy"]',
        (f"{_ON_SIMS}test_the_camera_above_by_hand",),
    ),
    Fault(
        "cameras and lights are not computed again",
        "sims/mujoco/render.py",
        "mujoco.mj_camlight(self._model, self._data)",
        "pass",
        (_FRAME,),
    ),
    Fault(
        "only the lamp is dimmed",
        _LOOKS,
        'getattr(model.vis.headlight, part)[:] = nominal * values["light_brightness"]',
        "getattr(model.vis.headlight, part)[:] = nominal",
        (_LIGHT,),
    ),
    Fault(
        "a dark table darkens everything",
        _LOOKS,
        "model.geom_rgba[self._surfaces, :3] = np.minimum(self._table[:, :3] * values",
        "model.geom_rgba[:, :3] = np.minimum(self._table[:1, :3] * values",
        (_LIGHT, _NOMINAL),
    ),
    Fault(
        "hues turn the other way",
        _LOOKS,
        "turned = chroma * cos + xp",
        "turned = chroma * cos - xp",
        (f"{_ON_SIMS}test_colours_by_hand",),
    ),
    Fault(
        "a wrapped environment's expert is that of the default",
        _CATALOG,
        'inner = options.get("env", own["env"].default)',
        'inner = own["env"].default',
        (_WRAPPED,),
    ),
    Fault(
        "a swapped instruction loses the other options",
        _CATALOG,
        'return {"options": {**inner_options, **swapped}}',
        'return {"options": {**swapped}}',
        (_WRAPPED,),
    ),
    Fault(
        "the next episode of Gymnasium's task keeps its physics",
        "sims/gym_physics.py",
        "if values == self._values:",
        "if values == {parameter.name: parameter.nominal for parameter in PHYSICS}:",
        (f"{_ON_GYM}test_nominal_episodes_are_gymnasium_s_own_bit_for_bit_also_after_others",),
    ),
    Fault(
        "derived constants of Gymnasium's task stay",
        "sims/gym_physics.py",
        "mujoco.mj_setConst(model, self._env.data)",
        "pass",
        (f"{_ON_GYM}test_every_environment_has_its_own_model",),
    ),
    Fault(
        "Gymnasium's gravity does not vary",
        "sims/gym_physics.py",
        'self._gravity * values["gravity"]',
        "self._gravity",
        (f"{_ON_GYM}test_a_pendulum_falls_sooner_where_gravity_is_stronger",),
    ),
    Fault(
        "every environment has the physics of the first",
        "sims/gym.py",
        "dict(zip(names, self._values[env_id].tolist(), strict=True))",
        "dict(zip(names, self._values[0].tolist(), strict=True))",
        (f"{_ON_GYM}test_every_environment_has_its_own_model",),
    ),
    Fault(
        "a snapshot of Gymnasium's task forgets the physics",
        "sims/gym.py",
        '{"actions": self._actions, "parameters": self._values}',
        '{"actions": self._actions}',
        (f"{_ON_GYM}test_a_snapshot_takes_the_physics_to_another_environment",),
    ),
    Fault(
        "noise is added to discrete actions",
        _WRAPPER,
        'and "action_noise" in randomization.distributions:',
        'and "noise" in randomization.distributions:',
        (f"{_ON_SIMS}test_noise_on_discrete_actions_is_refused",),
    ),
)
