"""Faults in what learners share: files, whose columns are whose, and who may read whom."""

from __future__ import annotations

from tests.mutants.fault import Fault

_BOARD, _SHARED = "vla_rl/experience/board.py", "vla_rl/experience/shared.py"
_SHARING = "vla_rl/recipes/sharing.py"
_ON_BOARD, _ON_SHARED = "tests/experience/test_board.py::", "tests/experience/test_shared.py::"
_ON_SHARING = "tests/recipes/test_sharing.py::"
_ONCE = f"{_ON_BOARD}test_the_newest_of_each_learner_come_first_and_none_twice"
_KEPT = f"{_ON_BOARD}test_only_the_newest_are_kept_and_what_a_careless_owner_keeps_is_not_read"
_TURNS = f"{_ON_BOARD}test_learners_take_turns"
_REMOVED = f"{_ON_BOARD}test_a_file_that_its_owner_removes_meanwhile_is_left_out"
_RESUMED = f"{_ON_BOARD}test_a_resumed_learner_is_the_same_and_counts_on"
_REFUSED = f"{_ON_BOARD}test_what_is_damaged_or_strange_is_refused_in_one_sentence"
_PROCESSES = f"{_ON_BOARD}test_two_processes_read_whole_rollouts_once_and_one_is_killed_in_the_middle_of_a_write"
_COLUMNS = f"{_ON_SHARED}test_others_are_further_columns_and_the_own_numbers_are_one_s_own"
_STALE = f"{_ON_SHARED}test_what_others_share_is_stale_at_every_version_of_the_learner"
_BY_HAND = f"{_ON_SHARED}test_the_gradient_of_ppo_with_decisions_of_another_policy_by_hand"
_GROUPS = f"{_ON_SHARED}test_groups_of_two_learners_stay_apart_and_the_own_return_is_one_s_own"
_KIND = f"{_ON_SHARED}test_a_learner_of_another_kind_is_refused_in_one_sentence"
_STATE = f"{_ON_SHARED}test_the_state_is_that_of_the_source_and_of_the_board"
_COMMON = f"{_ON_SHARING}test_learners_have_in_common_what_does_not_learn"

_FILES = (
    Fault(
        "a shared rollout is written under its final name",
        _BOARD,
        'writing = self.folder / f"{self.learner}.writing"',
        "writing = self._path(self.learner, number)",
        (_PROCESSES,),
    ),
    Fault(
        "a shared rollout is read again and again",
        _BOARD,
        "self._read[learner] = max(number, self._read.pop(learner, 0))",
        "self._read.pop(learner, 0)",
        (_ONCE, _PROCESSES),
    ),
    Fault(
        "after the newest shared rollout older ones are read",
        _BOARD,
        "self._read[learner] = max(number, self._read.pop(learner, 0))",
        "self._read[learner] = min(number, self._read.pop(learner, number))",
        (_ONCE,),
    ),
    Fault(
        "bfloat16 is shared",
        _BOARD,
        'if form.startswith("bfloat16"):',
        "if False:",
        (f"{_ON_BOARD}test_bfloat16_is_refused_before_anything_is_written",),
    ),
    Fault("a learner reads its own shared rollouts", _BOARD, "if learner != self.learner and ", "if ", (_ONCE,)),
    Fault(
        "the oldest shared rollouts come first", _BOARD, "sorted(numbers, reverse=True)", "sorted(numbers)", (_KEPT,)
    ),
    Fault(
        "the same learner is always read first",
        _BOARD,
        "(place, turns.get(learner, -1), learner, number)",
        "(place, 0, learner, number)",
        (_TURNS,),
    ),
    Fault(
        "shared rollouts are never removed",
        _BOARD,
        "if old <= number - self.keep:",
        "if old < 0:",
        (_KEPT,),
    ),
    Fault("shared rollouts of any age are read", _BOARD, " and max(numbers) - number < self.keep", "", (_KEPT,)),
    Fault("a removed shared rollout is an error", _BOARD, "if error.errno in _GONE:", "if False:", (_REMOVED,)),
    Fault(
        "a resumed learner overwrites its shared rollouts",
        _BOARD,
        "number = max([self._published, *self._numbers().get(self.learner, [])]) + 1",
        "number = self._published + 1",
        (_RESUMED,),
    ),
    Fault(
        "a resumed learner is another one to the others",
        _BOARD,
        'self.learner, self._published = state["learner"], state["published"]',
        'self._published = state["published"]',
        (_RESUMED, f"{_ON_SHARING}test_a_resumed_run_of_the_state_based_recipe_is_the_same_learner"),
    ),
    Fault(
        "rollouts of a stranger are taken",
        _BOARD,
        "if version == CONTRACT_VERSION and common == self.common:",
        "if version == CONTRACT_VERSION:",
        (_REFUSED,),
    ),
    Fault(
        "rollouts of another version are taken",
        _BOARD,
        "if version == CONTRACT_VERSION and common == self.common:",
        "if common == self.common:",
        (_REFUSED,),
    ),
    Fault(
        "a ragged rollout is taken",
        _BOARD,
        "                    layout(rollout)",
        "                    pass",
        (_REFUSED,),
    ),
)

_SOURCE = (
    Fault(
        "others' decisions count as one's own version",
        _SHARED,
        "return beside(own, others, self.policy.version - 1)",
        "return beside(own, others, self.policy.version)",
        (_STALE, _COLUMNS),
    ),
    Fault(
        "others' decisions keep their version",
        _SHARED,
        "version=torch.full_like(other.version, version, device=device)",
        "version=other.version",
        (_BY_HAND, _STALE),
    ),
    Fault(
        "groups of two learners that played one seed are joined",
        _SHARED,
        "seeds=other.seeds.to(device) - number * _APART",
        "seeds=other.seeds",
        (_GROUPS,),
    ),
    Fault(
        "others' groups with one seed are joined",
        _SHARED,
        "seeds=other.seeds.to(device) - number * _APART",
        "seeds=other.seeds - _APART",
        (_GROUPS,),
    ),
    Fault(
        "others' episodes count in the own return",
        "vla_rl/algorithms/group_relative.py",
        "mine = own_columns(rollout)",
        "mine = torch.ones_like(own_columns(rollout))",
        (_GROUPS,),
    ),
    Fault(
        "others' columns are not marked",
        _SHARED,
        "others=is_other, spans=own.spans",
        "spans=own.spans",
        (_COLUMNS, _GROUPS),
    ),
    Fault(
        "what was read is published as one's own",
        _SHARED,
        "        for other in others:",
        "        for other in [self.board.publish(other) or other for other in others]:",
        (f"{_ON_SHARED}test_others_are_never_published_again",),
    ),
    Fault(
        "the own counters are lost",
        _SHARED,
        'return replace(whole, info={**own.info, "rollout/shared": share}',
        'return replace(whole, info={**others[0].info, **own.info, "env/steps": 0.0, "rollout/shared": share}',
        (_COLUMNS, f"{_ON_SHARING}test_a_run_reads_what_another_left_and_counts_its_own_steps"),
    ),
    Fault("another environment's rollouts are taken", _SHARED, "if own.robot != other.robot:", "if False:", (_KIND,)),
    Fault(
        "what was read is not saved",
        _SHARED,
        'self.board.load_state_dict(state["board"])',
        "pass",
        (_STATE,),
    ),
    Fault(
        "GoRL learns from noise of another decoder",
        "vla_rl/algorithms/gorl.py",
        "if rollout.others is not None:",
        "if False:",
        (f"{_ON_SHARED}test_gorl_refuses_what_went_through_another_decoder",),
    ),
)

_LEARNERS = (
    Fault("scales may differ between learners", _SHARING, "if scales else b", "if False else b", (_COMMON,)),
    Fault(
        "frozen weights may differ between learners",
        _SHARING,
        "if id(parameter) not in learnt:",
        "if False:",
        (_COMMON, f"{_ON_SHARING}test_a_frozen_base_is_in_common_too"),
    ),
    Fault(
        "learners must have learnt the same",
        _SHARING,
        "if id(parameter) not in learnt:",
        "if True:",
        (_COMMON,),
    ),
    Fault(
        "a frozen base may differ between learners",
        _SHARING,
        "for part in policy._frozen if isinstance(policy, HoldsFrozen) else ():",
        "for part in ():",
        (f"{_ON_SHARING}test_a_frozen_base_is_in_common_too",),
    ),
    Fault(
        "several processes of one run share with each other",
        _SHARING,
        "if self.folder and group.size > 1:",
        "if False:",
        (f"{_ON_SHARING}test_several_processes_of_one_run_are_refused",),
    ),
    Fault(
        "without a folder the working folder is shared",
        _SHARING,
        "if not self.folder:",
        "if False:",
        (f"{_ON_SHARING}test_without_a_folder_there_is_no_source_around_the_own_one",),
    ),
    Fault(
        "--shared means nothing",
        "vla_rl/cli/override.py",
        ', "shared": "shared.folder"',
        "",
        (f"{_ON_SHARING}test_a_run_reads_what_another_left_and_counts_its_own_steps",),
    ),
)

FAULTS = (*_FILES, *_SOURCE, *_LEARNERS)
