"""``vla-rl push RUN_OR_FOLDER OWNER/NAME``: a policy or a dataset, with its card, to the Hugging Face hub."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from vla_rl.cli.override import override, positional
from vla_rl.contract.config import Checked
from vla_rl.contract.errors import UserError
from vla_rl.recipes.push import Card, Destination, Upload, dataset_upload, is_dataset, send
from vla_rl.recipes.terminal import console

_MOST = 12  # files that are listed one by one


@dataclass(frozen=True)
class Push(Checked):
    """Send a run's best checkpoint, a policy's folder or a dataset to the Hugging Face hub, its card filled in.

    Of a run, the checkpoint "best" is sent, or "imitation": its config.json and safetensors, nothing else.  A README.md
    of your own in the folder is sent as it is.  You have to be logged in (hf auth login), or HF_TOKEN has to be set.
    What is sent already is not sent again.
    """

    license: str = ""  # as the hub calls it: apache-2.0, mit, cc-by-4.0, gemma, ...
    private: bool = False  # make the repository so that nobody else sees it
    revision: str = "main"  # branch; made if it is missing
    base: str = ""  # OWNER/NAME[@REVISION] of the model that the policy was trained on, if you had it from elsewhere
    evaluation: tuple[str, ...] = ()  # files of vla-rl eval --out, folders of vla-rl eval --suite: results for the card
    dry_run: bool = False  # print the card and what would be sent, and send nothing


def push(arguments: Sequence[str]) -> None:
    """Gather, show, send."""
    usage = "push RUN_OR_FOLDER OWNER/NAME"
    (folder, name), rest = positional(arguments, usage, Push(), "runs/demo somebody/lift")
    config: Push = override(Push(), rest, f"vla-rl {usage}")
    destination = Destination(name, config.private, config.revision)
    upload = _gathered(Path(folder), Card(name, config.license), config)
    show_upload(upload, destination)
    if config.dry_run:
        print(upload.card)
    else:
        console.print(f"sent: {send(upload, destination)}")


def _gathered(folder: Path, card: Card, config: Push) -> Upload:
    if not folder.is_dir():
        raise UserError(
            f"there is no folder {str(folder)!r}, so nothing was sent; name a run, a checkpoint, a downloaded policy "
            "or a dataset."
        )
    if not is_dataset(folder):
        from vla_rl.recipes.push_policy import policy_upload

        return policy_upload(folder, card, config.base, [Path(place) for place in config.evaluation])
    for option, given in (("--base", config.base), ("--evaluation", config.evaluation)):
        if given:
            raise UserError(f"{option} is for policies and {str(folder)!r} is a dataset; leave it out.")
    return dataset_upload(folder, card)


@dataclass(frozen=True)
class PushWhenDone(Checked):
    """Options of what records a dataset: to send it when it is finished."""

    push: str = ""  # OWNER/NAME on the Hugging Face hub that the dataset is sent to when it is finished
    license: str = ""  # of what is sent, as the hub calls it: apache-2.0, mit, cc-by-4.0, ...
    private: bool = False  # make that repository so that nobody else sees it

    def __post_init__(self) -> None:
        """Raises UserError for a name that no repository can have, before anything is recorded."""
        super().__post_init__()
        if self.push:
            Destination(self.push, self.private)

    def push_dataset(self, folder: Path, command: Sequence[str]) -> None:
        """Send the finished dataset in ``folder``, which ``command`` has recorded, if that is wanted."""
        if self.push:
            destination = Destination(self.push, self.private)
            upload = dataset_upload(folder, Card(self.push, self.license, shlex.join(command)))
            show_upload(upload, destination)
            console.print(f"sent: {send(upload, destination)}")


def show_upload(upload: Upload, destination: Destination) -> None:
    """What goes where, in files and bytes; of many files, folder by folder."""
    many, files, sizes = len(upload.files) > _MOST, Counter[str](), Counter[str]()
    for name in upload.files:
        row = f"{name.partition('/')[0]}/" if many and "/" in name else name
        files[row] += 1
        sizes[row] += upload.size(name)
    table = Table("file", "files", "bytes")
    for row, count in files.items():
        table.add_row(row, str(count), f"{sizes[row]:,}")
    console.print(table)
    branch = "" if destination.revision == "main" else f", branch {destination.revision}"
    console.print(
        f"{sum(sizes.values()):,} bytes to the {upload.kind} {destination.name}{branch} on the Hugging Face hub"
    )
    if not destination.private:
        console.print(
            "everybody can see it there, unless it is there already and private; --private makes a private one"
        )
