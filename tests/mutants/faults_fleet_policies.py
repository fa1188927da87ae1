"""Faults in how policies are published to robots: manifests, signatures, files."""

from __future__ import annotations

from tests.mutants.fault import Fault

_MANIFEST, _SIGNING, _HEADER = (f"vla_rl/fleet/{name}.py" for name in ("manifest", "signing", "safetensors_header"))
_RELEASES, _REGISTRY, _CANARY, _HISTORY, _FILES, _CACHE = (
    f"vla_rl/fleet/{name}.py"
    for name in ("releases", "registry", "canary", "history", "checkpoint_files", "policy_cache")
)
_ON_REGISTRY, _ON_CANARY, _ON_HISTORY, _ON_CACHE = (
    f"tests/fleet/test_{name}.py::" for name in ("registry", "canary", "history", "policy_cache")
)
_ON_MANIFEST, _ON_SIGNING = "tests/fleet/test_manifest.py::", "tests/fleet/test_signing.py::"
_PATHS = f"{_ON_MANIFEST}test_files_stay_in_the_folder_and_beside_each_other"
_BOUNDS = f"{_ON_MANIFEST}test_a_field_that_is_out_of_bounds_is_refused"
_HEADERS = "tests/fleet/test_safetensors_header.py::test_a_damaged_file_is_refused"
_UNSIGNED = f"{_ON_SIGNING}test_anything_else_is_refused_before_it_is_parsed"

FAULTS = (
    Fault(
        "a manifest's file leaves its folder",
        _MANIFEST,
        "not all(_NAME.fullmatch(part) for part in parts)",
        "not _NAME.match(parts[-1])",
        (_PATHS,),
    ),
    Fault(
        "a file of a manifest takes the place of another one's folder",
        _MANIFEST,
        "_require(not path.startswith(previous),",
        "_require(path != previous,",
        (_PATHS,),
    ),
    Fault(
        "files of a manifest differ in case only",
        _MANIFEST,
        'path.lower() + "/"',
        'path + "/"',
        (_PATHS,),
    ),
    Fault(
        "a tensor has another size than its shape",
        _MANIFEST,
        "_require(math.prod(shape) * ITEM_BYTES[tensor.dtype] == tensor.data.size,",
        "_require(tensor.dtype in ITEM_BYTES,",
        (_BOUNDS,),
    ),
    Fault(
        "a manifest lists fewer chunks than its bytes need",
        _MANIFEST,
        'len(data["chunks"]) == count',
        'len(data["chunks"]) <= count',
        (_BOUNDS,),
    ),
    Fault(
        "a digest is only begun by one",
        _MANIFEST,
        "not _DIGEST.fullmatch(digest)",
        "not _DIGEST.match(digest)",
        (f"{_ON_MANIFEST}test_only_a_digest_names_a_chunk",),
    ),
    Fault(
        "a spec's hash leaves the control rate out",
        _MANIFEST,
        '("images", "state", "action", "control_dt")',
        '("images", "state", "action")',
        (f"{_ON_MANIFEST}test_the_hash_of_a_spec_is_of_what_a_policy_depends_on",),
    ),
    Fault(
        "a robot takes a manifest that nobody signed",
        _SIGNING,
        "not any(_made(key, signature, body) for",
        "not all(_made(key, signature, body) is not None for",
        (_UNSIGNED,),
    ),
    Fault(
        "a signature for another purpose counts for a manifest",
        _SIGNING,
        "_PURPOSE = b",
        '_PURPOSE = b"" and b',
        (_UNSIGNED,),
    ),
    Fault(
        "a manifest of any size is hashed",
        _SIGNING,
        "if len(signed) > MAX_SIGNED_BYTES or not",
        "if not",
        (f"{_ON_SIGNING}test_a_manifest_that_is_too_large_is_not_even_hashed",),
    ),
    Fault(
        "everybody reads the signing key",
        _SIGNING,
        "NoEncryption()), put=os.link)",
        "NoEncryption()), 0o644, os.link)",
        (f"{_ON_SIGNING}test_a_private_key_is_its_owners_and_never_replaced",),
    ),
    Fault(
        "a key of another kind is left out silently",
        _SIGNING,
        "if not keys or len(self._keys) < len(keys):",
        "if not self._keys:",
        (f"{_ON_SIGNING}test_files_without_such_a_key_are_named",),
    ),
    Fault(
        "tensors of a published file overlap",
        _HEADER,
        "if begin != end or stop - begin != place.size:",
        "if stop - begin != place.size:",
        (_HEADERS,),
    ),
    Fault(
        "a published file ends after its tensors",
        _HEADER,
        "if end != size - _LENGTH - length:",
        "if end > size - _LENGTH - length:",
        (_HEADERS,),
    ),
    Fault(
        "a header announces more than its file has",
        _HEADER,
        "min(MAX_HEADER_BYTES, size - _LENGTH)",
        "MAX_HEADER_BYTES",
        ("tests/fleet/test_safetensors_header.py::test_no_more_is_read_than_there_is",),
    ),
    Fault(
        "a robot of a canary keeps the active version",
        _RELEASES,
        "return self.canary if robot in self.canary_robots else self.active",
        "return self.active",
        (f"{_ON_REGISTRY}test_staged_canary_active_retired",),
    ),
    Fault(
        "everybody's pin beats a robot's own",
        _RELEASES,
        "for pinned in (robot, EVERY_ROBOT):",
        "for pinned in (EVERY_ROBOT, robot):",
        (f"{_ON_REGISTRY}test_pins_hold_whatever_is_promoted",),
    ),
    Fault(
        "a rollback leads to where the fleet is",
        _RELEASES,
        "*before, last = self.before",
        "*before, last = (*self.before, self.active or 0)",
        (f"{_ON_REGISTRY}test_a_rollback_is_a_new_head_and_no_number_is_used_again",),
    ),
    Fault(
        "a canary starts beside another one",
        _RELEASES,
        "tried = self._staged({**stages, change",
        "tried = self._staged({change",
        (f"{_ON_REGISTRY}test_another_canary_ends_the_one_before",),
    ),
    Fault(
        "the version that a rollback leads to is removed",
        _RELEASES,
        "{self.active, self.canary, *self.before[-1:], *self.pins.values()}",
        "{self.active, self.canary, *self.pins.values()}",
        (f"{_ON_REGISTRY}test_old_versions_go_and_those_in_use_stay",),
    ),
    Fault(
        "a number whose manifest was written is used again",
        _REGISTRY,
        "1 + max([0, *written, *self.releases.stages])",
        "1 + max([0, *self.releases.stages])",
        (f"{_ON_REGISTRY}test_a_number_whose_manifest_was_written_is_not_used_again",),
    ),
    Fault(
        "two who publish write at once",
        _REGISTRY,
        "fcntl.flock(lock, fcntl.LOCK_EX)",
        "fcntl.flock(lock, fcntl.LOCK_SH)",
        (f"{_ON_REGISTRY}test_two_who_publish_at_once_get_two_numbers",),
    ),
    Fault(
        "an episode counts whenever it is sent",
        _REGISTRY,
        "if position <= self._position:",
        "if position < self._position:",
        (f"{_ON_REGISTRY}test_an_episode_counts_once",),
    ),
    Fault(
        "a canary that does worse stays",
        _REGISTRY,
        "if verdict is not None and verdict.rollback:",
        "if verdict is not None and verdict.alarms:",
        (f"{_ON_REGISTRY}test_a_canary_that_does_worse_is_rolled_back_by_itself",),
    ),
    Fault(
        "a canary is taken back by its point estimate",
        _CANARY,
        "worse = canary_high < low",
        "worse = canary_low < low",
        (f"{_ON_CANARY}test_a_canary_is_taken_back_when_its_interval_lies_below",),
    ),
    Fault(
        "a canary is judged by its first episodes",
        _CANARY,
        "if min(canary.episodes, active.episodes) < rule.min_episodes:",
        "if active.episodes < rule.min_episodes:",
        (f"{_ON_CANARY}test_a_canary_is_taken_back_when_its_interval_lies_below",),
    ),
    Fault(
        "interventions are compared per second of nothing",
        _CANARY,
        "one.seconds / 60.0",
        "60.0",
        (f"{_ON_CANARY}test_a_rise_of_interventions_or_clips_per_minute_is_an_alarm",),
    ),
    Fault(
        "the same robots try every version",
        _CANARY,
        'f"{version} {robot}"',
        'f"{robot}"',
        (f"{_ON_CANARY}test_some_robots_try_a_version_and_others_the_next",),
    ),
    Fault(
        "a torn entry stays in front of the next one",
        _HISTORY,
        "file.truncate(self._end)",
        "file.truncate(self._disk.size(self._path))",
        (f"{_ON_HISTORY}test_whatever_is_left_of_a_torn_entry_does_not_count",),
    ),
    Fault(
        "entries behind damage are dropped silently",
        _HISTORY,
        "if any(_entry(later) is not None for later in lines[number + 1 :]):",
        "if any(_entry(later) is not None for later in lines[:number]) and not lines:",
        (f"{_ON_HISTORY}test_damage_that_others_follow_is_told",),
    ),
    Fault(
        "a link is published as the file it leads to",
        _FILES,
        "if path.is_symlink() or not path.is_file():",
        "if not path.is_file():",
        (f"{_ON_REGISTRY}test_a_folder_that_robots_could_not_use_is_refused",),
    ),
    Fault(
        "an interrupted chunk begins anew",
        _CACHE,
        "if self._disk.size(path) > size:",
        "if self._disk.size(path) > 0:",
        (f"{_ON_CACHE}test_an_interrupted_fetch_goes_on_in_the_middle_of_a_chunk",),
    ),
    Fault(
        "a chunk is used as it came",
        _CACHE,
        "if hashlib.sha256(self._disk.read(path)).hexdigest() == digest:",
        "if self._disk.size(path) == size:",
        (f"{_ON_CACHE}test_what_a_power_cut_spoilt_of_a_chunk_is_fetched_again",),
    ),
    Fault(
        "all of a policy is fetched again",
        _CACHE,
        "for digest, size in manifest.chunks().items() if not self._is_held(digest)}",
        "for digest, size in manifest.chunks().items()}",
        (f"{_ON_CACHE}test_only_what_changed_is_fetched",),
    ),
    Fault(
        "a damaged policy on the disk is used",
        _CACHE,
        "        if hashlib.sha256(data).hexdigest() != digest:",
        "        if not data:",
        (f"{_ON_CACHE}test_flipped_bits_are_seen_and_mended",),
    ),
    Fault(
        "a server may send more than a chunk has",
        _CACHE,
        "if not 0 < len(piece) <= size - there:",
        "if not 0 < len(piece):",
        (f"{_ON_CACHE}test_a_server_that_sends_something_else_is_refused",),
    ),
    Fault(
        "another version than was asked for is taken",
        _CACHE,
        "if manifest.version != version:",
        "if manifest.version < version - 1:",
        (f"{_ON_CACHE}test_another_version_than_was_asked_for_is_refused",),
    ),
    Fault(
        "a policy for another robot is fetched",
        _CACHE,
        "if manifest.spec_hash != spec_hash:",
        "if manifest.spec_hash != manifest.spec_hash:",
        (f"{_ON_CACHE}test_a_policy_for_another_robot_or_client_is_refused_before_it_is_fetched",),
    ),
    Fault(
        "the policy in use makes room for the next",
        _CACHE,
        "self._remove_all_but({version, *self.in_use()} & {*self.versions()})",
        "self._remove_all_but({version} & {*self.versions()})",
        (f"{_ON_CACHE}test_a_full_disk_leaves_the_old_policy_and_is_told",),
    ),
    Fault(
        "a full disk is a broken link",
        _CACHE,
        "if error.errno not in (errno.ENOSPC, errno.EDQUOT):",
        "if error.errno:",
        (f"{_ON_CACHE}test_a_full_disk_leaves_the_old_policy_and_is_told",),
    ),
)
