"""Faults in writing and reading datasets."""

from __future__ import annotations

from tests.mutants.fault import Fault

_PACKAGE, _TESTS = "vla_rl/experience/lerobot/", "tests/experience/test_lerobot_"
_WRITER, _DAMAGE, _GOLDEN = f"{_TESTS}writer.py::test_", f"{_TESTS}damage.py::test_", f"{_TESTS}golden.py::test_"
_ONE_WRITER = "tests/experience/test_padding_and_locks.py::test_"
_VIDEO, _STATISTICS = f"{_TESTS}video.py::test_", f"{_TESTS}statistics.py::test_"
_ROUND_TRIP = f"{_WRITER}twelve_episodes_come_back_bit_for_bit"
_SYNCED, _LIMITS = (
    f"{_WRITER}nothing_is_visible_before_it_is_synced",
    f"{_WRITER}files_and_folders_are_closed_at_their_limits",
)
_KILLED = f"{_TESTS}killed.py::test_a_writer_killed_anywhere_loses_no_finished_episode"
_NAMED = f"{_DAMAGE}damage_is_named_and_the_rest_is_read"
_GROWN = f"{_WRITER}a_dataset_grows_and_what_was_there_stays_untouched"
_NUMBERS = f"{_STATISTICS}numbers_by_their_definition"

_SAFETY = (
    Fault("an episode's files are not synced", f"{_PACKAGE}live.py", "        sync(file)", "        pass", (_SYNCED,)),
    Fault("a name is not synced", f"{_PACKAGE}disk.py", "    sync(target.parent)", "    pass", (_SYNCED,)),
    Fault(
        "a recorded episode is there before it is complete",
        f"{_PACKAGE}live.py",
        "    writing = folder.with_name(folder.name + WRITING)",
        "    writing = folder",
        (_KILLED,),
    ),
    Fault(
        "what a killed process moved is left behind",
        f"{_PACKAGE}compact.py",
        "            (root / name).unlink(missing_ok=True)",
        "            pass",
        (_KILLED,),
    ),
    Fault(
        "finished episodes are recorded ones too",
        f"{_PACKAGE}live.py",
        "if path.name not in done), key=_number)",
        "if path.name), key=_number)",
        (_KILLED,),
    ),
    Fault(
        "a dataset is undone although it counts its episodes",
        f"{_PACKAGE}live.py",
        "    return committed >= read_committing(",
        "    return committed > read_committing(",
        (_KILLED,),
    ),
    Fault(
        "statistics are missing for a moment",
        f"{_PACKAGE}metadata.py",
        '    if commit.get("total_episodes") == total:',
        "    if False:",
        (_KILLED,),
    ),
    Fault(
        "an episode that changed on the disk is trusted",
        f"{_PACKAGE}live.py",
        "path.stat().st_size != size or digest(path) != sha256:",
        "path.stat().st_size != size:",
        (f"{_WRITER}an_episode_that_the_disk_changed_is_put_aside_and_the_others_are_finished",),
    ),
    Fault(
        "an older info.json undoes what it does not count",
        f"{_PACKAGE}compact.py",
        "        if lost:",
        "        if False:",
        (f"{_WRITER}an_older_info_file_undoes_nothing",),
    ),
    Fault(
        "a file that nobody knows is overwritten",
        f"{_PACKAGE}compact.py",
        "    if taken:",
        "    if False:",
        (f"{_WRITER}a_stray_file_is_not_overwritten",),
    ),
    Fault(
        "two recordings mix",
        f"{_PACKAGE}disk.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        (f"{_WRITER}two_writers_exclude_each_other_but_a_dead_one_does_not",),
    ),
    Fault(
        "a dataset that is being recorded is taken away",
        "vla_rl/experience/datasets.py",
        "    require_unlocked(path)",
        "    pass",
        (f"{_ONE_WRITER}a_dataset_that_is_being_recorded_is_not_taken_away",),
    ),
    Fault(
        "NaN in a dataset is read in silence",
        f"{_PACKAGE}translate.py",
        "and not np.isfinite(values).all()",
        "and not np.isfinite(values).any()",
        (f"{_ONE_WRITER}a_number_that_is_not_finite_is_named",),
    ),
    Fault(
        "past an episode's end its last action is imitated",
        "vla_rl/experience/demonstrations.py",
        "ahead <= last",
        "ahead < 1 << 40",
        (f"{_ONE_WRITER}the_repeated_last_action_has_no_weight",),
    ),
    Fault(
        "numbers without checksums",
        f"{_PACKAGE}compact.py",
        'compression="snappy", write_page_checksum=True',
        'compression="snappy"',
        (f"{_DAMAGE}a_flipped_bit_never_changes_a_number_silently",),
    ),
    Fault(
        "an earlier dataset is overwritten",
        "vla_rl/experience/datasets.py",
        "        move_aside(path)",
        "        shutil.rmtree(path, ignore_errors=True)",
        (
            "tests/experience/test_demonstrations.py::test_an_earlier_dataset_is_moved_aside_and_other_things_are_left_alone",
        ),
    ),
)

_LAYOUT = (
    Fault(
        "splits are rounded one by one",
        f"{_PACKAGE}compact.py",
        "for share in np.cumsum(list(shares.values()))]",
        "for share in np.cumsum([round(part * episodes) / episodes for part in shares.values()])]",
        (f"{_WRITER}shares_that_round_badly_still_hold_every_episode",),
    ),
    Fault(
        "an episode's video ends at its length and not behind its start",
        f"{_PACKAGE}tables.py",
        "= starts[name][item.index] + item.live.length / schema.fps",
        "= item.live.length / schema.fps",
        (f"{_WRITER}every_episode_has_its_seconds_of_its_video",),
    ),
    Fault(
        "added episodes go into the last file",
        f"{_PACKAGE}compact.py",
        "    return last.next(",
        "    return last or (",
        (_GROWN,),
    ),
    Fault(
        "a file is closed one episode too late",
        f"{_PACKAGE}compact.py",
        "if groups[place] and size + more >= megabytes:",
        "if groups[place] and size >= megabytes:",
        (_LIMITS,),
    ),
    Fault(
        "a folder takes one file too many",
        f"{_PACKAGE}metadata.py",
        "if self.file + 1 >= files_per_folder else",
        "if self.file >= files_per_folder else",
        (_LIMITS,),
    ),
    Fault(
        "an episode's own task numbers reach the dataset",
        f"{_PACKAGE}compact.py",
        "np.array([numbers[text] for text in episode.live.tasks])[task_index],",
        "task_index,",
        (_ROUND_TRIP,),
    ),
    Fault(
        "frames are numbered per episode",
        f"{_PACKAGE}compact.py",
        '"index": np.arange(episode.first, episode.first + length),',
        '"index": np.arange(length),',
        (_GROWN,),
    ),
    Fault(
        "joined videos overlap",
        f"{_PACKAGE}video.py",
        "            before += count",
        "            before += 1",
        (_ROUND_TRIP,),
    ),
    Fault(
        "every episode begins with its file",
        f"{_PACKAGE}reader.py",
        'times = start + table["frame_index"]',
        'times = table["frame_index"]',
        (_ROUND_TRIP, f"{_GOLDEN}every_episode_is_read_from_its_files"),
    ),
    Fault(
        "only whole frames per second",
        f"{_PACKAGE}video.py",
        "return Fraction(fps).limit_denominator(1001)",
        "return Fraction(round(fps))",
        (f"{_VIDEO}frames_are_found_by_their_time",),
    ),
    Fault(
        "a frame that is missing is replaced by its neighbour",
        f"{_PACKAGE}video.py",
        "if abs(time - times[len(found)]) <= 0.25 / fps:",
        "if time - times[len(found)] >= -1.25 / fps:",
        (f"{_VIDEO}frames_are_found_by_their_time",),
    ),
    Fault(
        "splits do not grow",
        f"{_PACKAGE}compact.py",
        """':')[0]}:{after}"}""",
        """':')[0]}:{before}"}""",
        (_ROUND_TRIP,),
    ),
)

_TRUTH = (
    Fault(
        "damage is passed over in silence",
        f"{_PACKAGE}reader.py",
        "                if on_damage is None:",
        "                if False:",
        (_NAMED,),
    ),
    Fault(
        "the damaged column is not named",
        f"{_PACKAGE}reader.py",
        "Problem(place, str(error), (episode,), name)",
        "Problem(place, str(error), (episode,))",
        (_NAMED,),
    ),
    Fault(
        "integers pass for measurements",
        f"{_PACKAGE}features.py",
        'return depth in wanted and _kind(found) == np.dtype(feature.dtype).kind.replace("u", "i")',
        "return depth in wanted",
        (_NAMED,),
    ),
    Fault(
        "a frame without a value is read",
        f"{_PACKAGE}features.py",
        "    if column.null_count:",
        "    if False:",
        (_NAMED,),
    ),
    Fault(
        "a NaN is recorded",
        f"{_PACKAGE}writer.py",
        'if values.dtype.kind == "f" and not np.isfinite(values).all():',
        'if values.dtype.kind == "f" and not np.isfinite(values).any():',
        (f"{_WRITER}nans_and_texts_that_do_not_match_are_refused",),
    ),
    Fault(
        "a task keeps its index in another table",
        "vla_rl/experience/demonstrations.py",
        "return replace(self, task=numbers[self.task], tasks=tuple(tasks))",
        "return replace(self, tasks=tuple(tasks))",
        ("tests/experience/test_demonstrations.py::test_tasks_are_renumbered_in_another_table",),
    ),
    Fault(
        "a quantile is one value too high",
        f"{_PACKAGE}statistics.py",
        "return max(int(np.ceil(share * count - 1e-9)) - 1, 0)",
        "return min(int(np.ceil(share * count - 1e-9)), count - 1)",
        (_NUMBERS,),
    ),
    Fault(
        "the deviation divides by one less",
        f"{_PACKAGE}statistics.py",
        '"std": numbers.std(0),',
        '"std": numbers.std(0, ddof=min(1, len(numbers) - 1)),',
        (_NUMBERS,),
    ),
    Fault(
        "the deviation of all forgets that means differ",
        f"{_PACKAGE}statistics.py",
        '+ (part["mean"] - mean) ** 2 for part in parts])',
        "for part in parts])",
        (f"{_STATISTICS}parts_are_combined_as_if_they_had_been_one",),
    ),
    Fault(
        "short episodes count as much as long ones",
        f"{_PACKAGE}statistics.py",
        "    weights = counts / counts.sum()",
        "    weights = np.full(len(counts), 1 / len(counts))",
        (f"{_STATISTICS}parts_are_combined_as_if_they_had_been_one", f"{_GOLDEN}statistics_of_all_are_lerobots"),
    ),
)

_LOCK = (
    Fault(
        "frames out of order are taken as they come",
        f"{_PACKAGE}reader.py",
        "np.flatnonzero(np.diff(index) != 1)",
        "np.flatnonzero(np.diff(index) > 1)",
        (f"{_TESTS}damage.py::test_damage_is_named_and_the_rest_is_read",),
    ),
    Fault(
        "an episode a fifth slower is trained on as if it were not",
        f"{_PACKAGE}reader.py",
        "_RATE_TOLERANCE = 0.1",
        "_RATE_TOLERANCE = 0.25",
        (f"{_TESTS}damage.py::test_damage_is_named_and_the_rest_is_read",),
    ),
    Fault(
        "one pause makes an episode one of another rate",
        f"{_PACKAGE}reader.py",
        "np.abs(means * self.fps - 1.0).min()",
        "np.abs(means * self.fps - 1.0).max()",
        (f"{_TESTS}damage.py::test_what_other_writers_do_differently_is_read",),
    ),
    Fault(
        "episodes beyond a wrong count are left out silently",
        f"{_PACKAGE}metadata.py",
        "(len(rows) > total and finished)",
        "(len(rows) > total and not finished)",
        (f"{_TESTS}damage.py::test_what_other_writers_do_differently_is_read",),
    ),
    Fault(
        "an episode beyond a gap in the numbers is lost",
        "vla_rl/experience/lerobot/metadata.py",
        "if not blamed and (len(rows) == total or (len(rows) > total and finished)):",
        "if False:",
        ("tests/experience/test_padding_and_locks.py::test_episodes_whose_numbers_have_a_gap_are_read",),
    ),
    Fault(
        "a new episode gets a number that is taken",
        "vla_rl/experience/lerobot/writer.py",
        "if known.rows and known.rows[-1].index >= known.total:",
        "if False:",
        ("tests/experience/test_padding_and_locks.py::test_episodes_whose_numbers_have_a_gap_are_read",),
    ),
    Fault(
        "a second recorder is let in while the first writes",
        "vla_rl/experience/lerobot/disk.py",
        "fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)",
        ("tests/experience/test_lerobot_killed.py::test_a_lock_that_its_owner_removed_meanwhile_is_taken_anew",),
    ),
    Fault(
        "a lock whose file was removed counts as one",
        "vla_rl/experience/lerobot/disk.py",
        "if path.exists() and os.path.samestat(path.stat(), os.fstat(handle)):",
        "if True:",
        ("tests/experience/test_lerobot_killed.py::test_a_lock_that_its_owner_removed_meanwhile_is_taken_anew",),
    ),
    Fault(
        "a second writer finishes what the first still records",
        "vla_rl/experience/lerobot/writer.py",
        "            self._lock = take_lock(self.root / live.RECORDING)",
        "            return",
        ("tests/experience/test_padding_and_locks.py::test_a_dataset_that_is_being_recorded_is_not_taken_away",),
    ),
    Fault(
        "a writer whose folder was moved finishes another one's recording",
        "vla_rl/experience/lerobot/writer.py",
        "        _require_own(self.root / live.RECORDING, self._lock)",
        "        pass",
        ("tests/experience/test_padding_and_locks.py::test_a_recorder_whose_folder_went_does_not_finish_another_ones",),
    ),
    Fault(
        "a robot's second recorder is refused after its first episode only",
        "vla_rl/recipes/robots/recording.py",
        "        self._recording.__enter__()",
        "        pass",
        (
            "tests/experience/test_padding_and_locks.py::"
            "test_a_recorder_has_its_folder_before_the_first_episode_and_leaves_none_without_one",
        ),
    ),
)

FAULTS = (*_SAFETY, *_LAYOUT, *_TRUTH, *_LOCK)
