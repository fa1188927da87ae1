"""Faults in suites: what is played, byte for byte the same tables, comparisons, power."""

from __future__ import annotations

from tests.mutants.fault import Fault

_ONE, _RESULTS, _RUN = "vla_rl/evaluation/one_by_one.py", "vla_rl/evaluation/results.py", "vla_rl/recipes/suite_run.py"
_SUITE, _PLAYER, _DEPLOYED = (f"vla_rl/recipes/{name}.py" for name in ("suite", "suite_player", "deployed"))
_POWER, _PAIRED = "vla_rl/evaluation/power.py", "vla_rl/evaluation/paired.py"
_ON_ONE, _ON_RUN = "tests/evaluation/test_one_by_one.py::test_", "tests/recipes/test_suite_run.py::test_"
_ON_SUITE, _ON_DEPLOYED = "tests/recipes/test_suite.py::test_", "tests/recipes/test_deployed.py::test_"
_ON_POWER, _ON_PAIRED = "tests/evaluation/test_power.py::test_", "tests/recipes/test_suite_comparison.py::test_"

FAULTS = (
    Fault(
        "a policy decides for the idle environments too",
        _ONE,
        "for env_id in np.flatnonzero(self._playing).tolist():",
        "for env_id in range(len(obs.time)):",
        (f"{_ON_ONE}batches_are_of_one_and_each_environment_has_its_state",),
    ),
    Fault(
        "all environments have the state of the first",
        _ONE,
        "own, generators = {name: row[env_id] for name, row in rows.items()}, [generator[env_id]]",
        "own, generators = {name: row[0] for name, row in rows.items()}, [generator[env_id]]",
        (f"{_ON_ONE}batches_are_of_one_and_each_environment_has_its_state",),
    ),
    Fault(
        "episodes of a block that begins again are written twice",
        _RUN,
        "                    if episode.key in journal.episodes:",
        "                    if False:",
        (f"{_ON_RUN}a_process_of_an_engine_that_is_killed_costs_nothing_and_doubles_nothing",),
    ),
    Fault(
        "one process of a cluster is that which asks",
        _RUN,
        "            if self.processes == 1 and not chosen_engine().away:",
        "            if self.processes == 1:",
        (f"{_ON_RUN}a_process_of_an_engine_that_is_killed_costs_nothing_and_doubles_nothing",),
    ),
    Fault(
        "the mark of a suite's folder stays",
        "vla_rl/recipes/shared_disk.py",
        "        self._mark.unlink(missing_ok=True)",
        "        pass",
        (f"{_ON_RUN}a_process_of_an_engine_that_is_killed_costs_nothing_and_doubles_nothing",),
    ),
    Fault(
        "latencies of the episode before count",
        _ONE,
        "            self._seconds[env_id] = []",
        "            self._seconds[env_id] = self._seconds[env_id]",
        (f"{_ON_ONE}batches_are_of_one_and_each_environment_has_its_state",),
    ),
    Fault(
        "everybody reads what is privileged",
        _ONE,
        'bool(getattr(policy, "reads_privileged", False))',
        "False",
        (f"{_ON_ONE}privileged_observations_reach_those_alone_who_may_read_them",),
    ),
    Fault(
        "a suite is begun with a policy that cannot finish it",
        _DEPLOYED,
        "if not all(readable.values()):",
        "if not any(readable.values()):",
        (f"{_ON_RUN}instructions_that_a_policy_was_not_trained_for_are_named_before_anything_is_played",),
    ),
    Fault(
        "no number of episodes where a better policy has no room",
        "vla_rl/recipes/suite_comparison.py",
        "other = rate + difference if rate + difference <= 1 else rate - difference",
        "other = rate + difference if rate + difference <= 1 else -1.0",
        (f"{_ON_PAIRED}a_policy_with_no_room_above_is_compared_with_a_worse_one",),
    ),
    Fault(
        "the page of a run is overwritten",
        _RUN,
        "if taken:",
        "if len(taken) > 1:",
        (f"{_ON_RUN}the_page_of_a_run_is_not_overwritten",),
    ),
    Fault(
        "an evaluation that played nothing keeps its folder",
        _RUN,
        "if not journal.episodes:  # whatever was begun here, a misspelt policy for instance, has played nothing",
        "if not path.exists():",
        (f"{_ON_RUN}an_evaluation_that_played_nothing_does_not_keep_the_folder",),
    ),
    Fault(
        "episodes that a table lacks are not missed",
        "vla_rl/recipes/suite_comparison.py",
        "if len({episode.key for episode in found}) != expected:",
        "if len({episode.key for episode in found}) > expected:",
        (f"{_ON_PAIRED}a_table_that_lacks_episodes_is_named",),
    ),
    Fault(
        "a line that was cut off stays in the journal",
        _RESULTS,
        "os.truncate(self._path, len(whole))",
        "os.truncate(self._path, len(data))",
        (f"{_ON_RUN}stopped_at_any_episode_it_goes_on_to_the_same_bytes",),
    ),
    Fault(
        "the table is in the order in which episodes ended",
        _RUN,
        "[journal.episodes[key] for key in self.suite.keys]",
        "list(journal.episodes.values())",
        (f"{_ON_RUN}the_table_is_in_the_order_of_the_suite_whatever_ended_first",),
    ),
    Fault(
        "a stopped evaluation begins again",
        _RUN,
        "if (task.name, seed) not in known]",
        "if (task.name, seed, 0) not in known]",
        (f"{_ON_RUN}stopped_at_any_episode_it_goes_on_to_the_same_bytes",),
    ),
    Fault(
        "which episodes are filmed depends on what is missing",
        _RUN,
        "filmed = set(self.suite.seeds[: self.videos])",
        "filmed = set(missing[: self.videos])",
        (f"{_ON_RUN}stopped_at_any_episode_it_goes_on_to_the_same_bytes",),
    ),
    Fault(
        "results of another evaluation are mixed in",
        _RUN,
        "if difference := differing(before, own):",
        "if difference := differing(before, before):",
        (f"{_ON_RUN}results_of_another_evaluation_are_not_mixed_in",),
    ),
    Fault(
        "processes play the same seeds",
        _RUN,
        "own = missing[part::parts]",
        "own = missing[::parts]",
        (f"{_ON_RUN}the_number_of_processes_changes_no_byte",),
    ),
    Fault(
        "a video is written in place",
        _PLAYER,
        "writing.write_bytes(media.data)",
        "path.write_bytes(media.data)",
        (f"{_ON_RUN}killed_while_a_file_is_written_it_goes_on_to_the_same_bytes",),
    ),
    Fault(
        "all environments draw the noise of the first",
        _ONE,
        "out, own = self.policy.act(encoded, own, mode, generators)",
        "out, own = self.policy.act(encoded, own, mode, generator[:1])",
        (f"{_ON_RUN}the_number_of_environments_changes_no_byte",),
    ),
    Fault(
        "the rules of a task are not compared with its environment's",
        _SUITE,
        "            if wanted != found:",
        "            if wanted is None:",
        (f"{_ON_RUN}an_environment_with_other_rules_is_refused",),
    ),
    Fault(
        "a protocol is a name",
        _SUITE,
        "hashlib.sha256(text.encode())",
        "hashlib.sha256(self.name.encode())",
        (f"{_ON_SUITE}every_change_of_what_is_played_is_another_protocol",),
    ),
    Fault(
        "validation plays test seeds",
        _SUITE,
        '"validation": seed_ranges.VALIDATION.start',
        '"validation": self.first_seed',
        (f"{_ON_SUITE}a_part_of_a_suite",),
    ),
    Fault(
        "instructions keep the environment's numbers",
        "vla_rl/policies/renumbered.py",
        "replace(obs, task=self.numbers[obs.task])",
        "replace(obs, task=obs.task + 0 * self.numbers[obs.task])",
        (f"{_ON_DEPLOYED}a_policy_of_several_tasks_reads_the_instruction_of_the_environment",),
    ),
    Fault(
        "a fingerprint is that of the names",
        _DEPLOYED,
        "digest.update(path.read_bytes())",
        "digest.update(b'')",
        (f"{_ON_RUN}other_weights_in_the_same_folder_are_noticed",),
    ),
    Fault(
        "results name every simulator that is installed",
        "vla_rl/recipes/suite_results.py",
        "if made.name in played]",
        "if made.name]",
        (f"{_ON_RUN}results_name_the_version_of_a_simulator_in_an_installation_of_its_own",),
    ),
    Fault(
        "pairs are matched by their position",
        _PAIRED,
        "matched = [(episode, other[episode.key]) for episode in first]",
        "matched = list(zip(first, other.values(), strict=True))",
        (f"{_ON_PAIRED}pairs_are_matched_by_task_and_seed",),
    ),
    Fault(
        "the bootstrap resamples over tasks",
        _PAIRED,
        "RESAMPLES, strata=tasks)",
        "RESAMPLES)",
        (f"{_ON_PAIRED}the_interval_resamples_within_tasks",),
    ),
    Fault(
        "different protocols are compared",
        "vla_rl/recipes/suite_comparison.py",
        'if ours["protocol"] != theirs["protocol"]:',
        'if ours["protocol"] != ours["protocol"]:',
        (f"{_ON_PAIRED}other_protocols_are_refused_with_what_differs",),
    ),
    Fault(
        "the power of a one-sided test",
        _POWER,
        "np.searchsorted(2.0 * tail, level",
        "np.searchsorted(tail, level",
        (f"{_ON_POWER}the_power_is_that_of_simulated_evaluations",),
    ),
    Fault(
        "all pairs are discordant",
        _POWER,
        "pairs = _window(n, discordant)",
        "pairs = np.arange(n, n + 1)",
        (f"{_ON_POWER}the_power_is_that_of_simulated_evaluations",),
    ),
    Fault(
        "episodes for even odds",
        _POWER,
        "if mcnemar_power(middle, difference, discordant, level) >= power",
        "if mcnemar_power(middle, difference, discordant, level) >= 0.5",
        (f"{_ON_POWER}one_episode_less_has_less_power",),
    ),
)
