"""Faults in replay, mixtures, relabelling and what rollouts keep of what was executed."""

from __future__ import annotations

from tests.mutants.fault import Fault

_REPLAY, _STORAGE = "vla_rl/experience/replay.py", "vla_rl/experience/storage.py"
_MIXTURE, _RELABEL, _ROLLOUT = (f"vla_rl/experience/{name}.py" for name in ("mixture", "relabel", "rollout"))
_DRIVER = "vla_rl/experience/driver.py"
_ON_REPLAY, _ON_RELABEL = "tests/experience/test_replay.py::", "tests/experience/test_relabel.py::"
_ON_STORAGE, _ON_MIXTURE = "tests/experience/test_storage.py::", "tests/experience/test_mixture.py::"
_EXECUTED = "tests/experience/test_executed.py::test_executed_is_what_was_done_and_after_an_end_what_had_been_chosen"
_BRUTE = f"{_ON_REPLAY}test_n_steps_equal_brute_force_on_120_ragged_cases"
_GOLDEN = f"{_ON_REPLAY}test_golden_three_steps"
_SLOTS = f"{_ON_REPLAY}test_every_slot_can_be_recomputed_and_none_is_missing"
_SAVED = f"{_ON_REPLAY}test_a_saved_replay_goes_on_bit_for_bit"
_KILLED = f"{_ON_STORAGE}test_killed_inside_a_write_there_are_only_whole_decisions"

_MEMORY = (
    Fault(
        "a truncated decision has no value after it",
        _REPLAY,
        '"terminated": rollout.terminated,',
        '"terminated": rollout.terminated | rollout.truncated,',
        (_GOLDEN, _BRUTE),
    ),
    Fault(
        "what follows a truncation is the next episode's first",
        _REPLAY,
        "last = {name: item[final] for name, item in rollout.final_features.items()}",
        "last = {name: item[end + 1, row] for name, item in rollout.features.items()}",
        (_GOLDEN, _BRUTE),
    ),
    Fault(
        "n steps look past an end",
        _REPLAY,
        'columns["remaining"][slots].clamp_max(self.n_step)',
        'columns["remaining"][slots].clamp(self.n_step, self.n_step)',
        (_BRUTE,),
    ),
    Fault(
        "later rewards of n steps are not discounted",
        _REPLAY,
        'torch.where(within, discount * columns["reward"][slot], 0.0)',
        'torch.where(within, columns["reward"][slot], 0.0)',
        (_GOLDEN, _BRUTE),
    ),
    Fault(
        "a discount per decision and not per action",
        _REPLAY,
        'self.gamma ** columns["count"][slot], 1.0)',
        "self.gamma, 1.0)",
        (_BRUTE,),
    ),
    Fault(
        "an episode without its end",
        _REPLAY,
        '"count": valid.sum(-1),',
        '"count": valid.sum(-1) * (valid.all(-1) | (valid.shape[-1] == 1)),',
        (_BRUTE, _SLOTS),
    ),
    Fault(
        "rewards that were not earned",
        _REPLAY,
        "(torch.where(valid, rollout.reward, 0.0) * powers)",
        "(rollout.reward * powers)",
        (_BRUTE,),
    ),
    Fault(
        "the return of a truncated episode is what it had earned so far",
        _REPLAY,
        'if episode["terminated"][-1]:',
        "if len(reward):",
        (_GOLDEN, _BRUTE),
    ),
    Fault(
        "windows cut otherwise fill the replay in another order",
        _REPLAY,
        "for end, row in ends.nonzero().tolist():",
        "for row, end in ends.T.nonzero().tolist():",
        (f"{_ON_REPLAY}test_windows_cut_anywhere_give_the_same_replay",),
    ),
    Fault(
        "an episode that was broken off goes on in the next",
        _REPLAY,
        "played.clear()",
        "played.copy()",
        (f"{_ON_REPLAY}test_an_episode_that_was_broken_off_is_not_joined_to_the_next",),
    ),
    Fault(
        "new decisions are the growth of the replay",
        _REPLAY,
        'return int((self.columns["remaining"][newest] > 0).sum()) if written else 0',
        "return written and max(0, self._size - self.capacity)",
        (f"{_ON_REPLAY}test_what_is_new_is_counted_though_something_old_made_room",),
    ),
    Fault(
        "ends of episodes are drawn as decisions",
        _REPLAY,
        "self._playable = remaining.nonzero().flatten()",
        "self._playable = (remaining >= 0).nonzero().flatten()",
        (_SLOTS,),
    ),
    Fault(
        "a replay that goes on forgets its running episodes",
        _REPLAY,
        'self._open = {int(row): list(parts) for row, parts in state["open"].items()}',
        "self._open = {}",
        (_SAVED,),
    ),
    Fault(
        "a replay that goes on begins its ring anew",
        _REPLAY,
        'self._cursor, self._size, self._playable = state["cursor"], state["size"], None',
        'self._cursor, self._size, self._playable = 0, state["size"], None',
        (_SAVED,),
    ),
    Fault(
        "a state that is saved again at once is empty",
        _REPLAY,
        "            self.storage.note(self._cursor, self._size)",
        "            pass",
        (_SAVED,),
    ),
    Fault(
        "killed in a write, decisions are half of one and half of another",
        _REPLAY,
        'self.columns["remaining"][index] = 0  #',
        "#",
        (_KILLED,),
    ),
    Fault(
        "interventions are all decisions",
        _REPLAY,
        'return decisions[self.replay.columns["intervened"][decisions]] if len(decisions) else decisions',
        "return decisions",
        (f"{_ON_REPLAY}test_interventions_are_a_view",),
    ),
    Fault(
        "a replay is read with another gamma",
        _STORAGE,
        "if made_with[name] != value:",
        'if made_with[name] != value and name != "gamma":',
        (f"{_ON_STORAGE}test_other_numbers_are_refused",),
    ),
    Fault(
        "a file of another size is taken",
        _STORAGE,
        "if found is not None and found != needed:",
        "if found is not None and found > needed:",
        (f"{_ON_STORAGE}test_damage_is_named",),
    ),
    Fault(
        "shares are rounded each on its own",
        _MIXTURE,
        "counts[name] = round(size * behind / total) - given",
        "counts[name] = round(size * share / total)",
        (f"{_ON_MIXTURE}test_shares_are_kept_to_within_rounding_and_add_up",),
    ),
    Fault(
        "an empty memory keeps its share",
        _MIXTURE,
        "share if len(self.parts[name]) else 0.0 for",
        "share for",
        (f"{_ON_MIXTURE}test_the_others_have_the_share_of_an_empty_part",),
    ),
)

_RECORDED = (
    Fault(
        "a truncated recording keeps the action of unknown outcome",
        _RELABEL,
        "last = end if terminated else end - 1",
        "last = end",
        (f"{_ON_RELABEL}test_what_did_not_end_is_truncated_at_its_last_observation",),
    ),
    Fault(
        "recordings end by termination whatever their flags say",
        _RELABEL,
        "return bool(np.asarray(flags).reshape(-1)[step]) if flags is not None else False",
        "return True",
        (f"{_ON_RELABEL}test_what_did_not_end_is_truncated_at_its_last_observation",),
    ),
    Fault(
        "the base's plan is begun anew at every recorded step",
        _RELABEL,
        "found[i], state = policy.context(features, state, generator)",
        "found[i], _ = policy.context(features, state, generator)",
        (f"{_ON_RELABEL}test_the_base_acts_as_in_a_live_rollout_of_the_same_observations",),
    ),
    Fault(
        "the last offsets of a short episode are left out",
        _RELABEL,
        "range(min(offsets, end - begin))",
        "range(min(offsets, end - begin - 1) or 1)",
        (f"{_ON_RELABEL}test_every_offset_is_decided_at",),
    ),
    Fault(
        "what was not executed is zero",
        _ROLLOUT,
        "return torch.where(to_tensor(step.valid).unsqueeze(-1), executed, out.action.to(executed))",
        "return executed",
        (_EXECUTED,),
    ),
    Fault(
        "the choice is kept as what was executed",
        _ROLLOUT,
        "return torch.where(to_tensor(step.valid).unsqueeze(-1), executed, out.action.to(executed))",
        "return out.action.to(executed)",
        (_EXECUTED,),
    ),
    Fault(
        "last observations get the context of other rows",
        _DRIVER,
        "state = {name: item[env_ids] for name, item in self.state.items()}",
        "state = {name: item[: len(env_ids)] for name, item in self.state.items()}",
        (
            "tests/experience/test_executed.py::test_every_observation_gets_its_context_the_last_one_that_of_its_own_episode",
        ),
    ),
)

FAULTS = (*_MEMORY, *_RECORDED)
