"""What ``vla-rl inspect`` says about a downloaded folder: its model, and whether all of it is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from vla_rl.contract.errors import UserError
from vla_rl.policies.vla.checkpoint import PublicCheckpoint, read_public
from vla_rl.policies.vla.dataset_statistics import read_statistics
from vla_rl.policies.vla.tokenizer import FILE
from vla_rl.policies.vla.weights import tensor_sizes, weight_files


def describe_public(folder: Path) -> list[tuple[str, str]]:
    """Rows (what, value); what is missing is said in its row.  Weights are not read, only their headers.

    Raises UserError for a family that is not known and a damaged ``config.json``.
    """
    checkpoint = read_public(folder)
    known = {"state": checkpoint.state_size, "action": checkpoint.action_size}
    return [
        ("family", checkpoint.family),
        ("cameras", _cameras(checkpoint)),
        *((name, f"{size} entries" if size else "not declared") for name, size in known.items()),
        ("actions", f"chunks of {checkpoint.chunk}, {checkpoint.executed} executed"),
        ("tokenizer", _tokenizer(checkpoint)),
        ("statistics", _or_problem(lambda: _statistics(checkpoint))),
        ("weights", _or_problem(lambda: _weights(folder))),
        ("open it", f"--policy {folder} --env NAME, and --vla.OPTION VALUE where one does not fit"),
    ]


def _or_problem(row: Callable[[], str]) -> str:
    try:
        return row()
    except UserError as error:
        return str(error)


def _cameras(checkpoint: PublicCheckpoint) -> str:
    if not checkpoint.cameras:
        return "not named: the environment's, in order"
    sizes = {name: f" {h}x{w}" for name, (h, w) in checkpoint.image_shapes.items()}
    renamed = {name: f" (recorded as {old})" for name, old in checkpoint.renamed.items()}
    return ", ".join(f"{name}{sizes.get(name, '')}{renamed.get(name, '')}" for name in checkpoint.cameras)


def _tokenizer(checkpoint: PublicCheckpoint) -> str:
    if (checkpoint.folder / FILE).is_file():
        return f"{FILE} in the folder"
    if checkpoint.tokenizer:
        return f"{checkpoint.tokenizer}, from the Hugging Face hub or its cache"
    return f"missing: copy {FILE} into the folder"


def _statistics(checkpoint: PublicCheckpoint) -> str:
    found = read_statistics(checkpoint.folder, checkpoint.modes)
    state = "no state" if found.state is None else f"{len(found.state.offset)} state entries"
    return f"{Path(found.source).name}: {state}, {len(found.action.offset)} action entries"


def _weights(folder: Path) -> str:
    sizes = tensor_sizes(folder)
    by_dtype: Counter[str] = Counter()
    for dtype, count in sizes.values():
        by_dtype[dtype] += count
    numbers = ", ".join(f"{count:,} {dtype}" for dtype, count in by_dtype.most_common())
    files = len(weight_files(folder))
    return f"{len(sizes)} tensors in {files} {'file' if files == 1 else 'files'}: {numbers}"
