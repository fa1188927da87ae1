"""Faults in how policies are published to robots: manifests, signatures, files."""

from __future__ import annotations

from tests.mutants.fault import Fault

_MANIFEST, _SIGNING, _HEADER = (f"vla_rl/fleet/{name}.py" for name in ("manifest", "signing", "safetensors_header"))
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
        "os.O_EXCL, 0o600)",
        "os.O_EXCL, 0o644)",
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
)
