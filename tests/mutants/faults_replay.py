"""Faults in replay, mixtures, relabelling and the executed actions of a rollout."""

from __future__ import annotations

from tests.mutants.fault import Fault

_REPLAY, _STORAGE = "vla_rl/experience/replay.py", "vla_rl/experience/storage.py"
_RUNNING = "vla_rl/experience/running.py"
_MIXTURE, _RELABEL, _ROLLOUT = (f"vla_rl/experience/{name}.py" for name in ("mixture", "relabel", "rollout"))
_DRIVER = "vla_rl/experience/driver.py"
_ON_REPLAY, _ON_RELABEL = "tests/experience/test_replay.py::", "tests/experience/test_relabel.py::"
_ON_STORAGE, _ON_MIXTURE = "tests/experience/test_storage.py::", "tests/experience/test_mixture.py::"
_EXECUTED = "tests/experience/test_executed.py::test_executed_holds_executed_actions_and_chosen_ones_after_an_end"
_BRUTE = f"{_ON_REPLAY}test_n_steps_equal_brute_force_on_120_ragged_cases"
_GOLDEN = f"{_ON_REPLAY}test_golden_three_steps"
_SLOTS = f"{_ON_REPLAY}test_every_slot_can_be_recomputed_and_none_is_missing"
_SAVED = f"{_ON_REPLAY}test_a_saved_replay_resumes_bit_for_bit"
_KILLED = f"{_ON_STORAGE}test_killed_inside_a_write_there_are_only_whole_decisions"

_BUFFER = (
    Fault(
        "a truncated decision has no value after it",
        _RUNNING,
        '"terminated": rollout.terminated,',
        '"terminated": rollout.terminated | rollout.truncated,',
        (_GOLDEN, _BRUTE),
    ),
    Fault(
        "what follows a truncation is the next episode's first",
        _RUNNING,
        "= rollout.final_features[name][torch.from_numpy(row[truncated])].to(ends)",
        "= rollout.features[name][steps.time[last][truncated] + 1, env_ids[truncated]]",
        (_GOLDEN, _BRUTE),
    ),
    Fault(
        "n steps look past an end",
        _REPLAY,
        'columns["remaining"][slots].clamp_max(n_step)',
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
        _RUNNING,
        '"count": valid.sum(-1),',
        '"count": valid.sum(-1) * (valid.all(-1) | (valid.shape[-1] == 1)),',
        (_BRUTE, _SLOTS),
    ),
    Fault(
        "of a rollout that wraps the ring only the first part is written",
        _REPLAY,
        "slice(0, min(length, self.capacity) - behind)",
        "slice(0, 0)",
        (f"{_ON_REPLAY}test_the_last_slots_are_kept_and_tails_of_evicted_episodes_stay_valid",),
    ),
    Fault(
        "a larger buffer takes running episodes for the oldest",
        _REPLAY,
        "oldest = cursor + provisional if",
        "oldest = cursor if",
        (f"{_ON_REPLAY}test_a_full_replay_loads_into_a_larger_one",),
    ),
    Fault(
        "a larger buffer reads a ring across the old end",
        _REPLAY,
        "item.roll(-oldest, 0)",
        "item",
        (f"{_ON_REPLAY}test_a_full_replay_loads_into_a_larger_one",),
    ),
    Fault(
        "an episode that was broken off between windows loses its last action",
        _RUNNING,
        "last = last - (broken & ~carried)",
        "last = last - broken",
        (f"{_ON_REPLAY}test_an_episode_that_was_broken_off_is_truncated_and_not_joined_to_the_next",),
    ),
    Fault(
        "the last action of an episode that was broken off inside a window counts",
        _RUNNING,
        "last = last - (broken & ~carried)",
        "last = last - 0 * (broken & ~carried)",
        (f"{_ON_REPLAY}test_an_episode_that_was_broken_off_inside_a_window_ends_before_its_last_action",),
    ),
    Fault(
        "the version of a decision is not kept",
        _RUNNING,
        '"version": rollout.version,',
        '"version": rollout.version * 0,',
        (f"{_ON_REPLAY}test_every_decision_keeps_its_version_its_task_and_who_acted",),
    ),
    Fault(
        "two robots share their running episodes",
        _REPLAY,
        "running = self._running.get(rollout.stream, Running())",
        "running = next((item for item in self._running.values() if len(item.env_ids)), Running())",
        (f"{_ON_REPLAY}test_two_robots_never_mix",),
    ),
    Fault(
        "a running episode ends with the observation of its neighbour",
        _RUNNING,
        "item[-1][torch.from_numpy(np.unique(env_ids))]",
        "item[-1][torch.from_numpy(np.unique(env_ids)) * 0]",
        (_BRUTE, _SLOTS),
    ),
    Fault(
        "a running episode is added again beside its older copy",
        _REPLAY,
        "self._filled = (cursor, size, 0)",
        "self._filled = ((cursor + provisional) % self.capacity, min(self.capacity, size + provisional), 0)",
        (_SLOTS,),
    ),
    Fault(
        "decisions that ran in an earlier process are overwritten",
        _REPLAY,
        "if provisional and not any(len(running.env_ids) for running in self._running.values()):",
        "if False:",
        (f"{_ON_STORAGE}test_on_the_disk_equals_in_memory_and_outlives_the_process",),
    ),
    Fault(
        "a running episode is terminated at its latest observation",
        _RUNNING,
        "return _slots(self.columns, np.arange(",
        'return _slots({**self.columns, "terminated": self.columns["terminated"] | True}, np.arange(',
        (_BRUTE, _SLOTS),
    ),
    Fault(
        "running episodes cannot be sampled",
        _REPLAY,
        "unfinished = [part for part in (item.slots(self.gamma) for item in streams.values()) if part]",
        "unfinished: list[Columns] = []",
        (f"{_ON_REPLAY}test_early_samples_are_not_biased_towards_short_episodes", _BRUTE),
    ),
    Fault(
        "rewards that were not earned",
        _RUNNING,
        "(torch.where(valid, rollout.reward, 0.0) * powers)",
        "(rollout.reward * powers)",
        (_BRUTE,),
    ),
    Fault(
        "the return of a truncated episode is what it had earned so far",
        _RUNNING,
        "torch.where(unknown.to(total.device), -torch.inf, total)",
        "total",
        (_GOLDEN, _BRUTE),
    ),
    Fault(
        "windows cut otherwise fill the replay in another order",
        _RUNNING,
        "np.lexsort((steps.env_ids[first][closed], when[closed]))",
        "np.lexsort((when[closed], steps.env_ids[first][closed]))",
        (f"{_ON_REPLAY}test_windows_cut_anywhere_give_the_same_replay",),
    ),
    Fault(
        "an episode that was broken off continues in the next",
        _RUNNING,
        " | (seed[1:] != seed[:-1])",
        "",
        (f"{_ON_REPLAY}test_an_episode_that_was_broken_off_is_truncated_and_not_joined_to_the_next",),
    ),
    Fault(
        "new decisions are the growth of the buffer",
        _REPLAY,
        "return min(new, len(self))",
        "return max(0, len(self) - self.capacity + new)",
        (f"{_ON_REPLAY}test_new_decisions_are_counted_although_old_ones_are_evicted",),
    ),
    Fault(
        "the slots of ends are sampled as decisions",
        _REPLAY,
        "[:filled].nonzero().flatten()",
        "[:filled].ge(0).nonzero().flatten()",
        (_SLOTS,),
    ),
    Fault(
        "a resumed buffer forgets its running episodes",
        _REPLAY,
        'self._running = {stream: Running.from_state(item) for stream, item in state["running"].items()}',
        "self._running = {}",
        (_SAVED,),
    ),
    Fault(
        "a resumed buffer starts its ring at 0",
        _REPLAY,
        'cursor, size, provisional = state["filled"]',
        'cursor, size, provisional = 0, *state["filled"][1:]',
        (_SAVED,),
    ),
    Fault(
        "a state that is saved again at once is empty",
        _REPLAY,
        "        self._note((cursor, size, provisional))",
        "        self._filled = (cursor, size, provisional)",
        (_SAVED,),
    ),
    Fault(
        "killed in a write, decisions are half of one and half of another",
        _REPLAY,
        "remaining[slots] = 0  #",
        "pass  #",
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
        "counts[name] = round(size * cumulative / total) - drawn",
        "counts[name] = round(size * share / total)",
        (f"{_ON_MIXTURE}test_shares_are_kept_to_within_rounding_and_add_up",),
    ),
    Fault(
        "an empty buffer keeps its share",
        _MIXTURE,
        "share if len(self.parts[name]) else 0.0 for",
        "share for",
        (f"{_ON_MIXTURE}test_the_other_parts_take_the_share_of_an_empty_part",),
    ),
)

_RECORDED = (
    Fault(
        "an empty part with share 0 counts",
        _MIXTURE,
        "for name, part in self.parts.items() if self.shares[name])",
        "for name, part in self.parts.items())",
        (f"{_ON_MIXTURE}test_a_part_without_a_share_counts_for_nothing",),
    ),
    Fault(
        "a truncated group member gets the last observation of its neighbour",
        "vla_rl/experience/groups.py",
        "self.driver.final_features(np.array(list(truncated)))",
        "self.driver.final_features(np.array(sorted(truncated)))",
        ("tests/experience/test_executed.py::test_a_truncated_group_member_gets_the_context_of_its_own_environment",),
    ),
    Fault(
        "rollouts keep the pictures of every observation",
        "vla_rl/experience/driver.py",
        "return replace(self, obs=_bare(self.obs), step=step)",
        "return self",
        ("tests/experience/test_executed.py::test_sources_keep_no_pictures_beside_the_features",),
    ),
    Fault(
        "a truncated recording keeps the action of unknown outcome",
        _RELABEL,
        "last = end if terminated else end - 1",
        "last = end",
        (f"{_ON_RELABEL}test_an_unfinished_recording_is_truncated_at_its_last_observation",),
    ),
    Fault(
        "recordings end by termination whatever their flags say",
        _RELABEL,
        "return bool(np.asarray(flags).reshape(-1)[step]) if flags is not None else False",
        "return True",
        (f"{_ON_RELABEL}test_an_unfinished_recording_is_truncated_at_its_last_observation",),
    ),
    Fault(
        "corrections of a person are taken for the policy's actions",
        _RELABEL,
        "intervened=valid & _intervened(episodes, index),",
        "intervened=torch.zeros_like(valid),",
        (f"{_ON_RELABEL}test_corrections_stay_marked",),
    ),
    Fault(
        "the base plans again at every recorded step",
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
        (f"{_ON_RELABEL}test_every_offset_begins_a_decision",),
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
        ("tests/experience/test_executed.py::test_every_observation_gets_the_context_of_its_own_episode",),
    ),
)

FAULTS = (*_BUFFER, *_RECORDED)
