"""Faults in where objects are seen, in truth and dreams, and in what world models are learnt from and loaded as."""

from __future__ import annotations

from tests.mutants.fault import Fault

_PLACES, _PROBE, _LIKENESS = (f"vla_rl/evaluation/{name}.py" for name in ("object_positions", "probe", "frame_metrics"))
_WORLD, _DOUBT, _ENV = "vla_rl/training/world_model.py", "world_models/uncertainty.py", "world_models/env.py"
_ON_PLACES, _ON_PROBE = "tests/evaluation/test_object_positions.py::", "tests/evaluation/test_probe.py::"
_ON_LIKENESS, _ON_WORLD = "tests/evaluation/test_frame_metrics.py::", "tests/training/test_world_model.py::"
_REPEATED = f"{_ON_PLACES}test_a_repeated_episode_has_its_objects_where_they_were"
_ONCE = f"{_ON_PLACES}test_every_frame_is_there_once_with_the_place_of_its_moment"
_SHOWN = f"{_ON_PLACES}test_the_named_cube_is_where_the_picture_shows_its_colour"
_FINDS = f"{_ON_PROBE}test_it_finds_what_is_named"
_BY_HAND = f"{_ON_LIKENESS}test_millimetres_by_hand"
_OTHER = f"{_ON_WORLD}test_a_world_model_stands_for_no_other_world"
_WARNED = "tests/world_models/test_env.py::test_a_horizon_beyond_what_was_judged_is_warned_of"

FAULTS = (
    Fault("frames of rows that idle are kept", _PLACES, "kept & step.valid[:, h])", "kept)", (_ONCE,)),
    Fault(
        "a picture is shown with the place after the chunk",
        _PLACES,
        "Sightings.of(frame, kept & step.valid[:, h])",
        "Sightings.of(type(frame)(frame.images, frame.state, frame.task, frame.time, step.obs.extras), "
        "kept & step.valid[:, h])",
        (_ONCE,),
    ),
    Fault(
        "the first frame is not seen",
        _PLACES,
        "[Sightings.of(driver.start(seeds), kept)]",
        "[Sightings.of(driver.start(seeds), kept)][1:]",
        (_ONCE,),
    ),
    Fault(
        "rows without an episode of their own are kept",
        _PLACES,
        "np.arange(env.num_envs) < len(seeds)",
        "np.ones(env.num_envs, bool)",
        (_ONCE,),
    ),
    Fault(
        "cameras lie in the order they came in",
        _PLACES,
        "for name in sorted(obs.images)], -1)",
        "for name in obs.images], -1)",
        (f"{_ON_PLACES}test_cameras_lie_side_by_side_in_the_order_of_their_names",),
    ),
    Fault(
        "repeated places lack the start",
        _PLACES,
        "path[row, : length + 1].copy()",
        "path[row, 1 : length + 1].copy()",
        (_REPEATED,),
    ),
    Fault(
        "an episode that ended early is taken as it is",
        _PLACES,
        "if steps < length:",
        "if steps == 0 < length:",
        (f"{_ON_PLACES}test_an_episode_of_another_environment_is_noticed",),
    ),
    Fault(
        "the place is that of another object",
        _PLACES,
        "obs.extras[TARGET][rows])",
        'obs.extras["privileged/cubes"][rows, :3])',
        (_SHOWN,),
    ),
    Fault(
        "the probe does not hear the task",
        _PROBE,
        "self.gate(tasks)[..., None, None]",
        "self.gate(0 * tasks)[..., None, None]",
        (_FINDS,),
    ),
    Fault(
        "the threshold of the loss is in metres",
        _PROBE,
        "off / self.spread, torch.zeros_like(off), beta=_EXACT)",
        "off, torch.zeros_like(off), beta=_EXACT)",
        (f"{_ON_PROBE}test_the_loss_is_smooth_l1_in_spreads_and_the_error_is_in_millimetres",),
    ),
    Fault(
        "an outlier weighs as its square",
        _PROBE,
        "torch.zeros_like(off), beta=_EXACT)",
        "torch.zeros_like(off), beta=1e3)",
        (f"{_ON_PROBE}test_the_loss_is_smooth_l1_in_spreads_and_the_error_is_in_millimetres",),
    ),
    Fault("metres are called millimetres", _LIKENESS, "1e3 * np.linalg.norm(told", "np.linalg.norm(told", (_BY_HAND,)),
    Fault(
        "a distance is the mean over axes",
        _LIKENESS,
        ") - place, axis=-1)",
        ") - place, axis=-1) / 3**0.5",
        (_BY_HAND,),
    ),
    Fault(
        "the place is that of the step after",
        _LIKENESS,
        "else positions[lasting, horizon - 1]",
        "else positions[lasting, min(horizon, positions.shape[1] - 1)]",
        (_BY_HAND,),
    ),
    Fault(
        "the dream is compared with what the probe sees",
        _LIKENESS,
        "lasting.size, _apart(dreamt, place)",
        "lasting.size, _apart(dreamt, seen)",
        (_BY_HAND,),
    ),
    Fault(
        "the copied frame is that of other replays",
        _LIKENESS,
        "_apart(begun[lasting], place)",
        "_apart(begun[: lasting.size], place[::-1])",
        (_BY_HAND,),
    ),
    Fault(
        "replays that ended earlier count",
        _LIKENESS,
        "lasting = np.flatnonzero(steps >= horizon)",
        "lasting = np.flatnonzero(steps >= 1)",
        (_BY_HAND,),
    ),
    Fault(
        "the probe looks for another task",
        _LIKENESS,
        "named[lasting]) for item",
        "0 * named[lasting]) for item",
        (_BY_HAND,),
    ),
    Fault(
        "a world of other action bounds is taken",
        _WORLD,
        '"state": "state", "actions": "action", ',
        '"state": "state", ',
        (_OTHER,),
    ),
    Fault(
        "a world of other control steps is taken", _WORLD, 'parts["control steps"] = "control_dt"', "pass", (_OTHER,)
    ),
    Fault(
        "anything may be loaded as a world model",
        _WORLD,
        "if not isinstance(made_by, type) or not issubclass(made_by, nn.Module):",
        "if not callable(made_by):",
        (f"{_ON_WORLD}test_a_damaged_or_foreign_folder_is_refused",),
    ),
    Fault(
        "one outcome is enough",
        _WORLD,
        "require_both_outcomes(trajectories)",
        "pass",
        (f"{_ON_WORLD}test_episodes_that_all_ended_alike_teach_no_outcome",),
    ),
    Fault(
        "episodes of another world are learnt from",
        _WORLD,
        "require_world_of(model.spec, trajectories)",
        "pass",
        (f"{_ON_WORLD}test_episodes_of_another_world_are_refused",),
    ),
    Fault("what was judged is counted in calls", _DOUBT, "len(self.values) * frames", "len(self.values)", (_WARNED,)),
    Fault(
        "a horizon as long as judged is warned of",
        _DOUBT,
        "if judged < horizon:",
        "if critic_action <= horizon:",
        (_WARNED,),
    ),
    Fault(
        "dreams beyond what was judged begin silently",
        _ENV,
        "limits.warn_beyond(self.config.horizon, model.config.frames)",
        "pass",
        (_WARNED,),
    ),
)
