"""Faults in the choice of scenes by how their episodes ended."""

from __future__ import annotations

from tests.mutants.fault import Fault

_CURRICULUM, _SEEDS = "vla_rl/experience/curriculum.py", "vla_rl/experience/seeds.py"
_WINDOWS, _GROUPS = "vla_rl/experience/rollout.py", "vla_rl/experience/groups.py"
_ON = "tests/experience/test_curriculum.py::test_"
_BY_HAND, _IN_TIME = f"{_ON}chances_and_scores_by_hand", f"{_ON}every_scene_comes_back_in_time"
_DRAWN = f"{_ON}a_share_goes_in_order_and_the_rest_in_proportion_to_the_score"
_STREAM_GOES_ON, _SOURCE_GOES_ON = f"{_ON}a_saved_stream_goes_on", f"{_ON}a_saved_source_goes_on_bit_for_bit"
_PARTS = f"{_ON}parts_share_the_first_scenes_and_draw_on_their_own"
_TAKEN = f"{_ON}taken_scenes_are_left_out_unless_all_are"
_CUT = f"{_ON}episodes_that_were_cut_off_do_not_count_and_those_that_were_too_slow_do"
_MEMBERS = f"{_ON}groups_tell_every_member_once_and_no_scene_is_in_two_groups"

_BELIEFS = (
    Fault(
        "only the scene that was played forgets",
        _CURRICULUM,
        "self._counts *= self._fading",
        "self._counts[:, :, scene : scene + 1] *= self._fading",
        (_BY_HAND,),
    ),
    Fault(
        "a half-life counts episodes of all scenes",
        _CURRICULUM,
        "half_lives = np.array(config.half_lives) * len(scenes)",
        "half_lives = np.array(config.half_lives)",
        (_BY_HAND,),
    ),
    Fault(
        "a scene is believed to be like all scenes and not like its family",
        _CURRICULUM,
        "prior * means[:, self._family]",
        "prior * means[:, [-1] * len(self._family)]",
        (_BY_HAND,),
    ),
    Fault(
        "a scene of unknown family is believed to be like none",
        _CURRICULUM,
        "sums[..., -1] = self._counts.sum(-1)",
        "sums[..., -1] = 0",
        (_BY_HAND,),
    ),
    Fault(
        "scenes that are mastered count as open",
        _CURRICULUM,
        "return p * (1 - p)",
        "return p * p",
        (_BY_HAND, f"{_ON}most_draws_go_to_scenes_whose_outcome_is_open"),
    ),
    Fault(
        "only what improves is progress, and what is forgotten is not",
        _CURRICULUM,
        "return np.abs(chance[0] - chance[1])",
        "return np.maximum(chance[1] - chance[0], 0)",
        (f"{_ON}learning_progress_by_hand",),
    ),
)

_DRAWS = (
    Fault(
        "the scene of the highest score is drawn again and again",
        _CURRICULUM,
        "generator.choice(len(weights), p=weights / weights.sum())",
        "weights.argmax()",
        (_DRAWN,),
    ),
    Fault(
        "every draw throws the same dice",
        _CURRICULUM,
        "default_rng([self.seeds.start, self.seeds.step, before])",
        "default_rng([self.seeds.start, self.seeds.step, 0])",
        (_DRAWN,),
    ),
    Fault(
        "parts draw alike",
        _CURRICULUM,
        "default_rng([self.seeds.start, self.seeds.step, before])",
        "default_rng([before])",
        (_PARTS,),
    ),
    Fault(
        "every part has all scenes",
        _CURRICULUM,
        "scenes=-(-self.scenes // parts)",
        "scenes=self.scenes",
        (_PARTS,),
    ),
    Fault(
        "hopeless scenes are never tried again",
        _CURRICULUM,
        "if int(self.drawn * explore) > int(before * explore) or not weights.any():",
        "if not weights.any():",
        (_IN_TIME, _DRAWN),
    ),
    Fault(
        "two groups of one rollout play one scene",
        _CURRICULUM,
        "weights = np.where(free, scores, 0.0)",
        "weights = scores",
        (_TAKEN,),
    ),
    Fault(
        "a turn does not pass over scenes that are taken",
        _CURRICULUM,
        "while not free[self._turn % len(free)]:",
        "while False:",
        (_TAKEN,),
    ),
)

_SAVED = (
    Fault(
        "a resumed curriculum begins its round anew",
        _CURRICULUM,
        'self.drawn, self._turn = state["drawn"], state["turn"]',
        'self.drawn, self._turn = state["drawn"], 0',
        (_STREAM_GOES_ON,),
    ),
    Fault(
        "a saved curriculum goes on learning",
        _CURRICULUM,
        '"counts": self._counts.copy()',
        '"counts": self._counts',
        (f"{_ON}what_was_saved_stays_as_it_was",),
    ),
    Fault(
        "a resumed window draws the first scenes again",
        _WINDOWS,
        'self.seeds.load_state_dict(state["seeds"])',
        "self.seeds.state_dict()",
        (_SOURCE_GOES_ON,),
    ),
    Fault(
        "resumed groups draw the first scenes again",
        _GROUPS,
        'self.seeds.load_state_dict(state["seeds"])',
        "self.seeds.state_dict()",
        (_SOURCE_GOES_ON,),
    ),
    Fault(
        "a plain stream cannot read the states of before",
        _SEEDS,
        'state if isinstance(state, int) else state["drawn"]',
        'state["drawn"]',
        (f"{_ON}a_plain_stream_reads_states_that_are_a_number",),
    ),
)

_TOLD = (
    Fault(
        "an episode that was cut off is a failure",
        _CURRICULUM,
        "if success or host.terminated[env_id] or cause[env_id] == _TIME_LIMIT:",
        "if True:",
        (f"{_ON}episodes_whose_simulator_broke_down_do_not_count", _CUT),
    ),
    Fault(
        "an episode that was too slow is no failure",
        _CURRICULUM,
        "or cause[env_id] == _TIME_LIMIT:",
        "or False:",
        (_CUT,),
    ),
    Fault(
        "windows tell no outcomes",
        _WINDOWS,
        "self.seeds.ended(decision, ended)",
        "pass",
        (f"{_ON}a_window_tells_every_outcome_once",),
    ),
    Fault(
        "a group's outcomes are those of all environments",
        _GROUPS,
        "self.seeds.ended(decision, self._record(decision.host, decision.step.cause))",
        "self.seeds.ended(decision, self._record(decision.host, decision.step.cause) and range(self.env.num_envs))",
        (_MEMBERS,),
    ),
    Fault(
        "groups take the next scene whatever is being played",
        _GROUPS,
        "seed = self.seeds.draw(taken)",
        "seed = next(self.seeds)",
        (_MEMBERS,),
    ),
)

FAULTS = (*_BELIEFS, *_DRAWS, *_SAVED, *_TOLD)
