"""Faults in object positions (true and located) and in the training data of world models."""

from __future__ import annotations

from tests.mutants.fault import Fault

_POSITIONS, _PROBE, _METRICS = (
    f"vla_rl/evaluation/{name}.py" for name in ("object_positions", "probe", "frame_metrics")
)
_TRAINING, _LIMITS, _ENV = "vla_rl/training/world_model.py", "world_models/uncertainty.py", "world_models/env.py"
_ON_POSITIONS, _ON_PROBE = "tests/evaluation/test_object_positions.py::", "tests/evaluation/test_probe.py::"
_ON_METRICS, _ON_TRAINING = "tests/evaluation/test_frame_metrics.py::", "tests/training/test_world_model.py::"
_REPEATED = f"{_ON_POSITIONS}test_a_replayed_episode_has_its_objects_in_the_same_positions"
_ONCE = f"{_ON_POSITIONS}test_every_frame_occurs_once_with_its_own_position"
_SHOWN = f"{_ON_POSITIONS}test_the_named_cube_is_where_the_picture_shows_its_colour"
_FINDS = f"{_ON_PROBE}test_it_finds_the_named_object"
_BY_HAND = f"{_ON_METRICS}test_millimetres_by_hand"
_OTHER = f"{_ON_TRAINING}test_a_world_model_is_refused_for_another_environment"
_WARNED = "tests/world_models/test_env.py::test_a_horizon_beyond_the_calibrated_one_is_warned_of"

FAULTS = (
    Fault("frames after an episode's end are kept", _POSITIONS, "has_seed & step.valid[:, h])", "has_seed)", (_ONCE,)),
    Fault(
        "a frame has the position after the chunk",
        _POSITIONS,
        "LocatedFrames.of(frame, has_seed & step.valid[:, h])",
        "LocatedFrames.of(type(frame)(frame.images, frame.state, frame.task, frame.time, step.obs.extras), "
        "has_seed & step.valid[:, h])",
        (_ONCE,),
    ),
    Fault(
        "the initial frame is missing",
        _POSITIONS,
        "[LocatedFrames.of(driver.start(seeds), has_seed)]",
        "[LocatedFrames.of(driver.start(seeds), has_seed)][1:]",
        (_ONCE,),
    ),
    Fault(
        "frames of surplus environments are kept",
        _POSITIONS,
        "np.arange(env.num_envs) < len(seeds)",
        "np.ones(env.num_envs, bool)",
        (_ONCE,),
    ),
    Fault(
        "cameras are concatenated in dict order",
        _POSITIONS,
        "for name in sorted(obs.images)], -1)",
        "for name in obs.images], -1)",
        (f"{_ON_POSITIONS}test_cameras_are_concatenated_in_the_order_of_their_names",),
    ),
    Fault(
        "replayed positions lack the initial one",
        _POSITIONS,
        "path[i, : length + 1].copy()",
        "path[i, 1 : length + 1].copy()",
        (_REPEATED,),
    ),
    Fault(
        "an episode that ended early is accepted",
        _POSITIONS,
        "if steps < length:",
        "if steps == 0 < length:",
        (f"{_ON_POSITIONS}test_an_episode_of_another_environment_is_refused",),
    ),
    Fault(
        "the position is that of another object",
        _POSITIONS,
        "obs.extras[TARGET][index])",
        'obs.extras["privileged/cubes"][index, :3])',
        (_SHOWN,),
    ),
    Fault(
        "the probe ignores the task",
        _PROBE,
        "self.gate(tasks)[..., None, None]",
        "self.gate(0 * tasks)[..., None, None]",
        (_FINDS,),
    ),
    Fault(
        "the threshold of the loss is in metres",
        _PROBE,
        "error / self.position_std, torch.zeros_like(error), beta=_SMOOTH_L1_BETA)",
        "error, torch.zeros_like(error), beta=_SMOOTH_L1_BETA)",
        (f"{_ON_PROBE}test_the_loss_is_smooth_l1_in_standard_deviations_and_the_error_is_in_millimetres",),
    ),
    Fault(
        "an outlier counts squared",
        _PROBE,
        "torch.zeros_like(error), beta=_SMOOTH_L1_BETA)",
        "torch.zeros_like(error), beta=1e3)",
        (f"{_ON_PROBE}test_the_loss_is_smooth_l1_in_standard_deviations_and_the_error_is_in_millimetres",),
    ),
    Fault(
        "metres are called millimetres", _METRICS, "1e3 * np.linalg.norm(located", "np.linalg.norm(located", (_BY_HAND,)
    ),
    Fault(
        "a distance is the mean over axes",
        _METRICS,
        ") - place, axis=-1)",
        ") - place, axis=-1) / 3**0.5",
        (_BY_HAND,),
    ),
    Fault(
        "the position is that of the next step",
        _METRICS,
        "else positions[long_enough, horizon - 1]",
        "else positions[long_enough, min(horizon, positions.shape[1] - 1)]",
        (_BY_HAND,),
    ),
    Fault(
        "imagined positions are compared with the probe on true frames",
        _METRICS,
        "errors = _distances(located_imagined, place)",
        "errors = _distances(located_imagined, located_true)",
        (_BY_HAND,),
    ),
    Fault(
        "the copied frame is that of other replays",
        _METRICS,
        "_distances(located_first[long_enough], place)",
        "_distances(located_first[: long_enough.size], place[::-1])",
        (_BY_HAND,),
    ),
    Fault(
        "replays shorter than the horizon count",
        _METRICS,
        "long_enough = np.flatnonzero(steps >= horizon)",
        "long_enough = np.flatnonzero(steps >= 1)",
        (_BY_HAND,),
    ),
    Fault(
        "the probe locates another task",
        _METRICS,
        "named[long_enough]) for frames",
        "0 * named[long_enough]) for frames",
        (_BY_HAND,),
    ),
    Fault(
        "a world model with other action bounds is accepted",
        _TRAINING,
        '"state": "state", "actions": "action", ',
        '"state": "state", ',
        (_OTHER,),
    ),
    Fault(
        "a world model with another control rate is accepted",
        _TRAINING,
        'parts["control steps"] = "control_dt"',
        "pass",
        (_OTHER,),
    ),
    Fault(
        "anything may be loaded as a world model",
        _TRAINING,
        "if not issubclass(made_by, nn.Module):",
        "if not callable(made_by):",
        (f"{_ON_TRAINING}test_a_damaged_or_foreign_folder_is_refused",),
    ),
    Fault(
        "one outcome is enough",
        _TRAINING,
        "require_both_outcomes(trajectories)",
        "pass",
        (f"{_ON_TRAINING}test_episodes_that_all_ended_alike_teach_no_outcome",),
    ),
    Fault(
        "a world model is trained on episodes of another environment",
        _TRAINING,
        "require_same_env(model.spec, trajectories)",
        "pass",
        (f"{_ON_TRAINING}test_episodes_of_another_environment_are_refused",),
    ),
    Fault(
        "the calibrated horizon is counted in calls",
        _LIMITS,
        "len(self.values) * frames",
        "len(self.values)",
        (_WARNED,),
    ),
    Fault(
        "a horizon as long as calibrated is warned of",
        _LIMITS,
        "if calibrated < horizon:",
        "if calibrated <= horizon:",
        (_WARNED,),
    ),
    Fault(
        "imagined rollouts beyond the calibrated horizon start without a warning",
        _ENV,
        "limits.warn_beyond(self.config.horizon, model.config.frames)",
        "pass",
        (_WARNED,),
    ),
)
