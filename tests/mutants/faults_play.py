"""Faults in the clips of imagined rollouts and in the page where a person steers one."""

from __future__ import annotations

from tests.mutants.fault import Fault

_NAMES = ("rollout", "steering", "play")
_ROLLOUT, _STEERING, _PLAY = (f"vla_rl/recipes/imagine/{name}.py" for name in _NAMES)
_ON_ROLLOUT, _ON_STEERING, _ON_PLAY = (f"tests/recipes/imagine/test_{name}.py::" for name in _NAMES)
_CLIP = f"{_ON_ROLLOUT}test_a_clip_shows_what_was_recorded_beside_what_is_imagined_of_it"
_LABEL = f"{_ON_ROLLOUT}test_a_label_holds_kind_instruction_outcomes_and_uncertainty"
_BACK = f"{_ON_STEERING}test_back_takes_steps_back_so_that_the_same_keys_give_the_same_again"
_REPEATED = f"{_ON_STEERING}test_a_decision_that_was_taken_back_is_made_again"
_STEP = f"{_ON_STEERING}test_every_key_is_one_control_step_of_the_action_it_stands_for"
_OTHERS = f"{_ON_PLAY}test_pages_of_other_sites_press_no_key"

FAULTS = (
    Fault(
        "imagined pictures are shown as recorded ones",
        _ROLLOUT,
        "((recorded, won, 0), (imagined, imagined_won, width + _GAP))",
        "((imagined, imagined_won, 0), (recorded, won, width + _GAP))",
        (_CLIP,),
    ),
    Fault(
        "a clip has the imagined rollout of another episode",
        _ROLLOUT,
        "driver.start(chosen)",
        "driver.start(np.arange(len(spans)))",
        (_CLIP,),
    ),
    Fault(
        "a clip stands still after an imagined success",
        _ROLLOUT,
        "endless = world_models.endless_rollouts(calibrated.imagination, longest)",
        "endless = calibrated.imagination",
        (_CLIP,),
    ),
    Fault(
        "the bar shows uncertainty over the first limit",
        _ROLLOUT,
        "np.array([t // model.config.frames])",
        "np.array([0])",
        (_CLIP,),
    ),
    Fault("the bar is full at the limit", _ROLLOUT, "min(uncertainty / 2.0, 1.0)", "min(uncertainty, 1.0)", (_CLIP,)),
    Fault(
        "a missed success is called hallucinated",
        _ROLLOUT,
        "[one & ~other, other & ~one, one & other]",
        "[other & ~one, one & ~other, one & other]",
        (_LABEL,),
    ),
    Fault(
        "clips are of one kind as long as there are any",
        _ROLLOUT,
        "for i in range(len(kinds)) for column in waiting if i < len(column)]",
        "for column in waiting for i in range(len(column))]",
        (f"{_ON_ROLLOUT}test_kinds_take_turns_as_long_as_there_are_any",),
    ),
    Fault(
        "uncertainty is reported for the first call above the limit instead of its step",
        _ROLLOUT,
        "{step[np.argmax(uncertainty > limit)]}",
        "{1 + np.argmax(uncertainty > limit)}",
        (_LABEL,),
    ),
    Fault(
        "going back leaves the imagined rollout where it is",
        _STEERING,
        "self._obs = self.env.restore(np.zeros(1, int), moment.snapshot)",
        "self._obs = self._obs",
        (_BACK,),
    ),
    Fault(
        "going back leaves the gripper as it is",
        _STEERING,
        "self._idle, self._plan = moment.idle, moment.plan",
        "self._plan = moment.plan",
        (_BACK,),
    ),
    Fault(
        "going back leaves the policy's state as it is",
        _STEERING,
        "self._idle, self._plan = moment.idle, moment.plan",
        "self._idle = moment.idle",
        (_REPEATED,),
    ),
    Fault(
        "every decision of a rollout has the same noise",
        _STEERING,
        "(1 + self.view.episode) + self.view.step",
        "(1 + self.view.episode)",
        (_REPEATED,),
    ),
    Fault(
        "the next key lets go of what the policy holds",
        _STEERING,
        "return self._step(chunk, plan, _gripping(self._idle, self.env.spec.action, chunk[0, -1]))",
        "return self._step(chunk, plan, self._idle)",
        (f"{_ON_STEERING}test_the_policy_decides_once_and_is_shown_step_by_step",),
    ),
    Fault(
        "a call's last step is compared with the next limit",
        _STEERING,
        "(time - 1) // self.env.model.config.frames",
        "time // self.env.model.config.frames",
        (_STEP,),
    ),
    Fault(
        "the bounds of a move are symmetric",
        _STEERING,
        "            bound = (high if key.sign > 0 else low)[key.entry]",
        "            bound = key.sign * high[key.entry]",
        (f"{_ON_STEERING}test_each_direction_has_its_own_bound_and_shift_a_share_of_it",),
    ),
    Fault(
        "the gripper opens again with the next key",
        _STEERING,
        "return self._step(action[None, None], self._plan, idle)",
        "return self._step(action[None, None], self._plan, self._idle)",
        (_STEP,),
    ),
    Fault(
        "a learner's deadline ends what a person does",
        _PLAY,
        "deadline=None, keyframe_share=0.0",
        "keyframe_share=0.0",
        (f"{_ON_STEERING}test_an_end_is_reported_in_words",),
    ),
    Fault(
        "the page is served to the whole network",
        _PLAY,
        'ThreadingHTTPServer(("127.0.0.1", port), Bound)',
        'ThreadingHTTPServer(("0.0.0.0", port), Bound)',
        (f"{_ON_PLAY}test_a_key_sent_over_a_socket_is_pressed_and_what_is_to_be_seen_comes_back",),
    ),
    Fault(
        "names that begin like this machine's are answered",
        _PLAY,
        "if name in _HOSTS and",
        "if name.startswith(_HOSTS) and",
        (f"{_ON_PLAY}test_other_names_of_this_machine_are_refused",),
    ),
    Fault("pages of other sites press keys", _PLAY, ' and origin == f"http://{host}":', ":", (_OTHERS,)),
    Fault(
        "forms of other sites press keys",
        _PLAY,
        'self.headers.get_content_type() != "application/json"',
        "not self.headers.get_content_type()",
        (_OTHERS,),
    ),
    Fault(
        "outcomes that are shown are read from pictures that were denoised in one step",
        "vla_rl/recipes/imagine/play.py",
        "config = replace(config, mid_call_steps=0)",
        "config = replace(config, mid_call_steps=1)",
        ("tests/recipes/imagine/test_steering.py::test_the_policy_decides_once_and_is_shown_step_by_step",),
    ),
)
