"""Syncs that are left out where policies are published, remembered and kept on robots."""

from __future__ import annotations

from tests.mutants.fault import Fault

_CACHE, _HISTORY, _REGISTRY, _STORE = (
    f"vla_rl/fleet/{name}.py" for name in ("policy_cache", "history", "registry", "content_store")
)
_CUT = "tests/fleet/test_policy_power_cut.py::"
_SERVER = (f"{_CUT}test_what_was_published_and_promoted_survives_a_power_cut_at_any_point",)
_ROBOT = (f"{_CUT}test_a_robots_policies_survive_a_power_cut_at_any_point",)
_NAMES = "self._disk.sync_folder(self._folder)"

FAULTS = (
    Fault("a file that is written whole is not synced", _STORE, "file.sync()", "pass", _SERVER),
    Fault("the names of chunks are not synced", _STORE, _NAMES, "pass", _SERVER),
    Fault("the name of a folder of policies is not synced", _STORE, "disk.sync_folder(folder.parent)", "pass", _SERVER),
    Fault("an entry of the history is not synced", _HISTORY, "file.sync()", "pass", _SERVER),
    Fault(
        "the name of the history is not synced",
        _HISTORY,
        "self._disk.sync_folder(self._path.parent)",
        "pass",
        _SERVER,
    ),
    Fault("a policy is published before its chunks are synced", _REGISTRY, "self._store.sync()", "pass", _SERVER),
    Fault(
        "the name of a manifest is not synced",
        _REGISTRY,
        'self._disk.sync_folder(self._folder / "manifests")',
        "pass",
        _SERVER,
    ),
    Fault("a robot's checkpoint is not synced", _CACHE, "file.sync()", "pass", _ROBOT),
    Fault("the names in a checkpoint are not synced", _CACHE, "self._disk.sync_folder(path.parent)", "pass", _ROBOT),
    Fault(
        "what a robot acts by is not synced",
        _CACHE,
        'write_whole(self._disk, self._folder / "in_use", json.dumps(current).encode())',
        'return write_whole(self._disk, self._folder / "in_use", json.dumps(current).encode())',
        _ROBOT,
    ),
    Fault(
        "the name of a robot's manifest is not synced",
        _CACHE,
        'write_whole(self._disk, self._path(manifest.version, ".manifest"), signed)',
        'return write_whole(self._disk, self._path(manifest.version, ".manifest"), signed)',
        _ROBOT,
    ),
)
