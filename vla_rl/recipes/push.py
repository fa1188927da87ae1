"""Sending folders to the Hugging Face hub: what of them is sent, how, and what is said where it is not taken.

Nothing of the machine goes with a folder: of a run, its one checkpoint is sent; no optimizer, replay buffer, log,
tracker or config file.  Datasets need no torch here; what a policy's folder takes is in ``push_policy.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from vla_rl.contract import hub
from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import check_folder, read_json

CARD = "README.md"
_DATASET = ("meta", "data", "videos", "images", "*.lance")  # folders of a dataset in LeRobot's format
_INFO, _RECORDING = Path("meta") / "info.json", "recording"
_PATH = re.compile(r"""(?<![\w./~:-])~?/(?:[^\s"',{}\[\]/]*/)*([^\s"',{}\[\]/]+)""")  # a whole path within a text
_LISTED = 20  # instructions on a card
Content: TypeAlias = Path | bytes


@dataclass(frozen=True)
class Upload:
    """Files for a repository: {path in it: a file here, or what it holds}.

    replaces  patterns of what an earlier upload may have left there
    tag       that is moved to it, on the main branch
    """

    kind: hub.Kind
    files: Mapping[str, Content]
    replaces: tuple[str, ...]
    tag: str = ""

    def size(self, name: str) -> int:
        content = self.files[name]
        return len(content) if isinstance(content, bytes) else content.stat().st_size

    @property
    def card(self) -> str:
        content = self.files[CARD]
        return (content if isinstance(content, bytes) else content.read_bytes()).decode("utf-8", "replace")


@dataclass(frozen=True)
class Card:
    """What is not in a folder: the name of its repository and its license, and the command that made it."""

    name: str
    license: str = ""  # as the hub calls it
    command: str = ""

    def written(self, metadata: Any, text: str) -> bytes:
        """The page: ``metadata`` of huggingface_hub, then ``text``."""
        if not self.license:
            text += "\nIts author has named no license.\n"
        return f"---\n{metadata.to_yaml()}\n---\n\n# {self.name.partition('/')[2]}\n\n{text}".encode()

    def rows(self, facts: Mapping[str, object]) -> str:
        """A table of those ``facts`` that are known, and the command."""
        known = {**facts, "Command": f"`{without_paths(self.command)}`" if self.command else ""}
        lines = [f"| {name} | {_cell(value)} |" for name, value in known.items() if value not in ("", None)]
        return "\n".join(["| | |", "|---|---|", *lines]) + "\n"


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def without_paths(text: str) -> str:
    """``text`` with the last part of every whole path in it: where things lie here is nobody's business."""
    return _PATH.sub(r"…/\1", text)


def listed(tasks: Sequence[str]) -> str:
    """Instructions in quotes, the first of many."""
    return ", ".join(f"“{task}”" for task in tasks[:_LISTED]) + (", …" if len(tasks) > _LISTED else "")


def is_dataset(folder: Path) -> bool:
    """Whether ``folder`` holds a dataset, finished or not."""
    return (folder / _INFO).is_file() or (folder / _RECORDING).is_dir()


def dataset_upload(folder: Path, card: Card) -> Upload:
    """A LeRobotDataset with a card like LeRobot's, which has the tag that LeRobot's loader looks for.

    Raises UserError for one whose recording is not finished, and for a damaged one.
    """
    from vla_rl.experience.lerobot.reader import DatasetReader

    check_folder(folder)
    if (folder / _RECORDING).exists() or not (folder / _INFO).is_file():
        raise UserError(
            f"the recording in {str(folder)!r} is not finished, so nothing was sent; first run vla-rl collect --repair "
            f"{folder}."
        )
    try:
        info = read_json(folder / _INFO)
        version, features = str(info["codebase_version"]), dict(info["features"])
        text, read = _about_dataset(folder, info, features, card), DatasetReader(folder).files()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{str(folder / _INFO)!r} is damaged ({type(error).__name__}: {error}), so nothing was sent; copy the "
            "dataset again."
        ) from error
    folders = (*_DATASET, *sorted({name.partition("/")[0] for name in read}))
    files: dict[str, Content] = {
        path.relative_to(folder).as_posix(): path
        for path in _files(folder, tuple(f"{name}/**/*" for name in folders))
        if path.name[0] != "."
    }
    files |= {name: folder / name for name in sorted(read) if (folder / name).is_file()}
    client = hub.client("nothing can be sent")
    metadata = client.DatasetCardData(
        license=card.license or None,
        task_categories=["robotics"],
        tags=["LeRobot", "vla-rl"],
        configs=[{"config_name": "default", "data_files": "data/*/*.parquet"}] if (folder / "data").is_dir() else None,
    )
    card_and_files = with_card(folder, files, card.written(metadata, text))
    return Upload("dataset", card_and_files, tuple(f"{name}/*" for name in folders), version)


def with_card(folder: Path, files: Mapping[str, Content], card: bytes) -> dict[str, Content]:
    """``files`` with the ``README.md`` and license of the ``folder``; where it has none of the first, with ``card``."""
    own = {path.name: path for path in _files(folder, (CARD, "LICENSE*"))}
    return {CARD: card, **own, **dict(sorted(files.items()))}


def _files(folder: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    return (path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file())


def _about_dataset(folder: Path, info: Mapping[str, Any], features: Mapping[str, Any], card: Card) -> str:
    from vla_rl.experience.lerobot.metadata import read_metadata

    found = read_metadata(folder)
    cameras = [f"`{name}` {'×'.join(map(str, features[name]['shape']))}" for name in found.schema.cameras]
    facts = {
        "Format": f"LeRobotDataset {info['codebase_version']}",
        "Episodes": info["total_episodes"],
        "Frames": f"{info['total_frames']}, {info['fps']:g} per second",
        "Robot": info.get("robot_type"),
        "Cameras": ", ".join(cameras),
        "Instructions": listed(found.tasks),
        **{part: _entries(features.get(name)) for part, name in _VECTORS.items()},
    }
    use = f"vla-rl train imitate.py:from_dataset --dataset {card.name}"
    return f"Recorded episodes of a robot.\n\n{card.rows(facts)}\n```sh\n{use}\n```\n"


_VECTORS = {"State": "observation.state", "Action": "action"}


def _entries(feature: Mapping[str, Any] | None) -> str:
    """How many numbers a vector has, and their names."""
    if feature is None:
        return ""
    names = feature.get("names")
    named = f": {', '.join(map(str, names))}" if isinstance(names, list) else ""
    return f"{'×'.join(map(str, feature['shape']))}{named}"


# -- the way there -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Destination:
    """A repository to write to.  ``private``: where it is new, nobody else sees it."""

    name: str
    private: bool = False
    revision: str = "main"
    message: str = field(default="Upload by vla-rl", repr=False)

    def __post_init__(self) -> None:
        """Raises UserError for what is no name of a repository."""
        found = hub.named(self.name)
        if found is None or found.revision:
            how = "name the branch with --revision" if found else "write OWNER/NAME, as in the address of its page"
            raise UserError(
                f"{self.name!r} cannot be a repository on the Hugging Face hub, so nothing was sent; {how}."
            )


def send(upload: Upload, destination: Destination) -> str:
    """Send ``upload`` to ``destination``, which is made where it is missing; returns the address of its page.

    What is there already is not sent again, so a repetition goes on where an upload was stopped.  Raises UserError when
    the hub does not take it; KeyboardInterrupt says how to go on.
    """
    client = hub.client("nothing can be sent")
    api, where = client.HfApi(), {"repo_type": upload.kind}
    with _said(client, destination):
        page = str(api.create_repo(destination.name, private=destination.private or None, exist_ok=True, **where))
        if destination.private and not api.repo_info(destination.name, **where).private:
            raise UserError(
                f"{destination.name!r} is on the hub already and everybody can see it, so nothing was sent; leave "
                "--private out, name another repository, or make it private on its page."
            )
        if destination.revision != "main":
            api.create_branch(destination.name, branch=destination.revision, exist_ok=True, **where)
        with _staged(upload) as folder:
            given = {"revision": destination.revision, "commit_message": destination.message, **where}
            done = api.upload_folder(
                repo_id=destination.name, folder_path=folder, delete_patterns=[*upload.replaces], **given
            )
        if upload.tag and destination.revision == "main":
            _move_tag(client, api, destination.name, upload, done.oid)
    return page


def _move_tag(client: Any, api: Any, name: str, upload: Upload, commit: str) -> None:
    """Let the tag be of ``commit``, as LeRobot does: LeRobot reads the version of a dataset that has its tag."""
    where = {"repo_type": upload.kind}
    with suppress(client.errors.RevisionNotFoundError):  # where it is new
        api.delete_tag(name, tag=upload.tag, **where)
    api.create_tag(name, tag=upload.tag, revision=commit, **where)


@contextmanager
def _staged(upload: Upload) -> Iterator[Path]:
    """A folder of links that looks like the repository will."""
    with TemporaryDirectory(prefix="vla-rl-push-") as name:
        for file, content in upload.files.items():
            path = Path(name) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                os.symlink(content.resolve(), path)
        yield Path(name)


@contextmanager
def _said(client: Any, destination: Destination) -> Iterator[None]:
    """Raise UserError with one sentence for what the client raises inside."""
    try:
        yield
    except UserError:
        raise
    except KeyboardInterrupt as stop:
        raise type(stop)(
            f"stopped before all was in {destination.name!r}; the same command goes on, and sends nothing twice."
        ) from stop
    except hub.errors_of(client) as error:
        raise UserError(_sentence(client, destination.name, error)) from error


def _sentence(client: Any, name: str, error: Exception) -> str:
    """Why the repository ``name`` did not get it all, what follows and what to do."""
    refused = error if hasattr(error, "response") else error.__cause__  # of one file among several
    status = getattr(getattr(refused, "response", None), "status_code", 0)
    if status in (401, 403, 404) and client.get_token() is None:
        return (
            f"the Hugging Face hub does not know who you are, so nothing was sent to {name!r}; log in with a "
            "token that may write (hf auth login), or set HF_TOKEN."
        )
    if status == 401:
        return (
            f"the Hugging Face hub does not take your token, so nothing was sent to {name!r}; log in again (hf "
            "auth login), or correct HF_TOKEN if it is set."
        )
    if status in (403, 404):
        return (
            f"your token may not write to {name!r} on the Hugging Face hub, so nothing was sent; name a "
            "repository of yours, or log in with a token that may (hf auth login)."
        )
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip(" -")]
    if isinstance(error, ValueError) and lines and "metadata" in lines[0]:
        return (
            f"the Hugging Face hub does not take the head of {CARD} ({'; '.join(lines[1:]) or lines[0]}), so nothing "
            "was sent; --license takes what its list of licenses has, such as apache-2.0."
        )
    return (
        f"not all of it could be sent to {name!r} on the Hugging Face hub ({hub.first_line(error)}); the same "
        "command goes on when it can be reached, and sends nothing twice."
    )
