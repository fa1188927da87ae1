"""What of a policy's folder, or of the best checkpoint of a run, is sent to the Hugging Face hub, and its card.

The card says what the run recorded (``config.json``, ``command.txt``, ``summary.json``) and what evaluations of these
very files measured.  Places on this machine become names on the hub, or nothing is sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vla_rl.contract import hub
from vla_rl.contract.config import JsonMapping, JsonObject
from vla_rl.contract.env import EnvSpec
from vla_rl.contract.errors import UserError
from vla_rl.contract.trust import check_folder, reaching, read_json
from vla_rl.evaluation.report import mean_text, percent
from vla_rl.evaluation.stats import Rate
from vla_rl.policies.pretrained import read_config
from vla_rl.policies.vla.checkpoint import is_public
from vla_rl.policies.vla.saving import fingerprint as base_fingerprint
from vla_rl.policies.vla.weights import ADAPTER, adapted, is_adapter
from vla_rl.pretrained import CONFIG, checkpoint_of, is_run
from vla_rl.recipes.policies import fingerprint
from vla_rl.recipes.push import Card, Content, Upload, listed, with_card, without_paths
from vla_rl.recipes.recipe import RESULTS
from vla_rl.recipes.suite_run import RESULTS as SUITE_RESULTS
from vla_rl.recipes.suite_run import read_results
from vla_rl.training.tracking import COMMAND

_STATISTICS = "statistics"  # of VLAOptions: what they were read from is of no use once the policy is made


@dataclass(frozen=True)
class _Result:
    """``found`` as in a summary: a rate or a mean return, of ``episodes`` ("test episodes") in ``env``."""

    policy: str
    env: str
    episodes: str
    found: JsonMapping

    @property
    def is_rate(self) -> bool:
        return "success" in self.found

    @property
    def text(self) -> str:
        low, high = self.found["low"], self.found["high"]
        if self.is_rate:
            return percent(Rate(self.found["success"], low, high, self.found["episodes"]))
        return mean_text(self.found["mean"], low, high)


def policy_upload(folder: Path, card: Card, base: str = "", evaluations: Sequence[Path] = ()) -> Upload:
    """The policy of ``folder``, a run, checkpoint or public folder, with its card.

    ``base``: the name on the hub of the folder that it builds on, where that did not come from there.
    ``evaluations``: what ``vla-rl eval`` wrote, ``--out`` files or the folders of suites.
    Raises UserError for what is no policy, for a base that is not on the hub or is another one, for evaluations of
    other files, and for a config that leads to something on this machine.
    """
    path = checkpoint_of(folder)
    check_folder(path)
    public = is_public(path)
    config = read_json(path / CONFIG) if public else read_config(path)
    files = _files(path, base)
    results = [*_of_run(path), *(one for place in evaluations for one in _of_evaluation(place, path))]
    facts = _Facts(path, config, public, results, card, _origin(path, files))
    return Upload("model", with_card(path, files, facts.card()), hub.MODEL_FILES)


# -- the files ---------------------------------------------------------------------------------------------------------


def _files(folder: Path, base: str) -> dict[str, Content]:
    """What a download would fetch of ``folder``; configs name nothing of this machine."""
    found: dict[str, Content] = {}
    paths = sorted({path for pattern in hub.MODEL_FILES for path in folder.rglob(pattern) if path.is_file()})
    inside = [path.relative_to(folder) for path in paths]
    named: dict[str, str] = {}
    for name in (name for name in inside if not any(part.startswith(".") for part in name.parts)):
        found[name.as_posix()] = folder / name
        if name.name == CONFIG:
            value = read_json(folder / name)
            named |= _base_on_hub(value, folder, base)
            if (sent := _elsewhere(value, named)) != value:
                found[name.as_posix()] = json.dumps(sent, indent=2).encode()
            _require_portable(sent, folder / name)
    if is_adapter(folder):
        found[ADAPTER] = _adapter_on_hub(read_json(folder / ADAPTER), folder, base)
    return found


def _adapter_on_hub(config: JsonObject, folder: Path, base: str) -> Content:
    """``adapter_config.json`` of ``folder``, which names what the adapter was trained on as it is on the hub."""
    beneath = adapted(folder)
    assert beneath is not None
    if Path(str(config["base_model_name_or_path"])).is_dir():
        name, _, commit = _name_on_hub(str(beneath), base_fingerprint(beneath), folder, base).partition("@")
        config = {**config, "base_model_name_or_path": name, "revision": commit}
    return json.dumps(config, indent=2).encode()


def _base_on_hub(config: Any, folder: Path, base: str) -> dict[str, str]:
    """{place of the base of ``config`` on this machine: its name on the hub}; {} where it has none."""
    saved = config.get("base") if isinstance(config, dict) else None
    if not isinstance(saved, dict) or not {"folder", "fingerprint"} <= saved.keys():
        return {}
    return {str(saved["folder"]): _name_on_hub(str(saved["folder"]), saved["fingerprint"], folder, base)}


def _name_on_hub(place: str, found: str, folder: Path, base: str) -> str:
    """The name on the hub, with its commit, of ``place`` with the fingerprint ``found``, on which ``folder`` builds."""
    name = hub.portable(place)
    if not hub.is_pinned(name):
        if not base:
            raise UserError(
                f"{str(folder)!r} holds only what was learnt on top of {place!r}, which did not come from the Hugging "
                "Face hub, so nobody else could open it and nothing was sent; name it there with --base OWNER/NAME, "
                "after vla-rl push of that folder if need be."
            )
        name = hub.portable(hub.located(base))
        if not hub.is_pinned(name) or base_fingerprint(hub.cached(name, CONFIG) or Path(name)) != found:
            raise UserError(
                f"--base {base!r} has other weights, or another config.json, than {place!r}, on top of which "
                f"{str(folder)!r} was trained, so together they would be another policy and nothing was sent; name "
                "the one that it is on the Hugging Face hub."
            )
    return name


def _elsewhere(value: Any, named: JsonMapping, key: str = "") -> Any:
    """``value`` with places on this machine by their names on the hub, and without that of statistics."""
    if isinstance(value, dict):
        return {name: _elsewhere(item, named, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_elsewhere(item, named) for item in value]
    return "" if key == _STATISTICS and isinstance(value, str) else named.get(value, value) if value else value


def _require_portable(config: Any, path: Path) -> None:
    """Raise UserError where ``config`` leads to something on this machine."""
    if found := next((one for one in reaching(config) if one.startswith("the path")), ""):
        raise UserError(
            f"{str(path)!r} names {found}, which is on this machine alone, so nobody else could open it and nothing "
            "was sent; train the policy anew without it."
        )


def _origin(folder: Path, files: dict[str, Content]) -> str:
    """The model on the hub that the policy began with, by its commit; "" for none."""
    for name, content in files.items():
        if Path(name).name == CONFIG:
            value = json.loads(content) if isinstance(content, bytes) else read_json(content)
            base = value.get("base") if isinstance(value, dict) else None
            if isinstance(base, dict) and hub.is_pinned(str(base.get("folder"))):
                return str(base["folder"])
    name = hub.portable(str(_run(folder).get("policy") or ""))
    return name if hub.is_pinned(name) else ""


# -- what is known of it -----------------------------------------------------------------------------------------------


def _run_of(checkpoint: Path) -> Path | None:
    """The run that a checkpoint lies in, ``RUN/checkpoints/NAME``."""
    run = checkpoint.resolve().parent.parent
    return run if is_run(run) else None


def _run(checkpoint: Path) -> JsonObject:
    """The config of that run as JSON; {} where there is none."""
    run = _run_of(checkpoint)
    found: JsonObject = read_json(run / "config.json") if run else {}
    return found


_OF_CHECKPOINT = {"best": ("rl", "return"), "imitation": ("imitation", "validation")}


def _of_run(checkpoint: Path) -> Iterator[_Result]:
    """The results of this checkpoint that its run wrote into ``summary.json``."""
    run = _run_of(checkpoint)
    if run is None or not (run / "summary.json").is_file():
        return
    summary, env = read_json(run / "summary.json"), str(_env(checkpoint).get("name") or "")
    for name in _OF_CHECKPOINT.get(checkpoint.name, ()):
        if isinstance(found := summary.get(name), dict) and {"low", "high", "episodes"} <= found.keys():
            policy, episodes = RESULTS[name]
            yield _Result(policy, env, f"{found['episodes']} {episodes}", found)


def _of_evaluation(place: Path, checkpoint: Path) -> Iterator[_Result]:
    """The results in ``place``; raises UserError for those of another checkpoint, and for other files."""
    suite = place.is_dir()
    try:
        saved = read_results(place) if suite else read_json(place)
        own = saved["policy"]["sha256"] if suite else saved["sha256"]
        rows = saved["tasks"] if suite else {saved["env"]: saved}
        kind = f"episodes of {saved['protocol']}" if suite else f"{saved['seeds']} episodes"
        found = [
            _Result(
                "evaluated", name, f"{one['returns']['episodes']} {kind}", one if "success" in one else one["returns"]
            )
            for name, one in rows.items()
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{str(place)!r} is no evaluation of a checkpoint ({type(error).__name__}: {error}), so nothing was sent; "
            f"name a file that vla-rl eval --out wrote, or the folder with {SUITE_RESULTS} of a suite."
        ) from error
    if own != fingerprint(str(checkpoint)):
        raise UserError(
            f"{str(place)!r} is an evaluation of other weights than those in {str(checkpoint)!r}, so nothing was sent; "
            "evaluate these, or leave it out."
        )
    yield from found


def _env(checkpoint: Path) -> JsonObject:
    env = _run(checkpoint).get("env")
    return env if isinstance(env, dict) else {}


@dataclass(frozen=True)
class _Facts:
    """What the card of a policy says, from its folder and its run."""

    folder: Path
    config: JsonMapping
    public: bool
    results: Sequence[_Result]
    page: Card
    base: str

    def card(self) -> bytes:
        """The whole page."""
        card = replace(self.page, command=self.page.command or self._command())
        return card.written(self._metadata(), self._text(card))

    def _command(self) -> str:
        run = _run_of(self.folder)
        path = run / COMMAND if run else None
        return " && ".join(path.read_text(encoding="utf-8").splitlines()) if path and path.is_file() else ""

    @property
    def _spec(self) -> EnvSpec | None:
        saved = self.config.get("spec")
        return EnvSpec.from_json(saved) if isinstance(saved, dict) else None

    @property
    def _env_name(self) -> str:
        return str(_env(self.folder).get("name") or (self._spec.name if self._spec else ""))

    @property
    def _kind(self) -> str:
        """The class of the policy, or what a public folder calls its model."""
        named = (self.config.get(name) for name in ("policy", "type", "model_type"))
        return str(next(filter(None, named), "")).rpartition(":")[2]

    @property
    def _dataset(self) -> str:
        """The dataset on the hub that the run learnt from, by its commit; "" for none."""
        run = _run(self.folder)
        named = (str(run.get(name) or "") for name in ("dataset", "demonstrations"))
        return next(filter(hub.is_pinned, named), "")

    def _metadata(self) -> Any:
        client = hub.client("nothing can be sent")
        lerobot = self.public and "type" in self.config
        library = "lerobot" if lerobot else "transformers" if self.public else "vla-rl"
        return client.ModelCardData(
            license=self.page.license or None,
            library_name=library,
            pipeline_tag="robotics",
            tags=["robotics", "vla-rl", *([self._env_name] if self._env_name else []), self._kind],
            base_model=self.base.partition("@")[0] or None,
            datasets=[self._dataset.partition("@")[0]] if self._dataset else None,
            model_name=self.page.name.partition("/")[2],
            eval_results=[self._measured(client, one) for one in self.results] or None,
        )

    def _measured(self, client: Any, one: _Result) -> Any:
        value, low, high = one.found["success" if one.is_rate else "mean"], one.found["low"], one.found["high"]
        return client.EvalResult(
            task_type="robotics",
            dataset_type=one.env or "environment",
            dataset_name=f"{one.env or 'environment'}, {one.episodes}",
            metric_type="success_rate" if one.is_rate else "mean_return",
            metric_value=value,
            metric_name="Success rate" if one.is_rate else "Mean return",
            metric_args={"interval_95": [low, high], "episodes": one.found["episodes"]},
        )

    def _text(self, card: Card) -> str:
        run, options = _run(self.folder), _env(self.folder).get("options")
        algorithm = (run.get("rl") or {}).get("algorithm") or {}
        facts = {
            "Environment": self._env_name and f"`{self._env_name}`",
            "Its options": f"`{without_paths(json.dumps(options))}`" if options else "",
            **_of_spec(self._spec),
            "Policy": f"`{self._kind}`",
            "Base": self.base and _linked(self.base),
            "Dataset": self._dataset and _linked(self._dataset, "datasets/"),
            "Algorithm": str(algorithm.get("class", "")).removesuffix("Config"),
            "Seed of training": run.get("seed"),
        }
        return f"A policy for a robot, by vla-rl.\n\n{card.rows(facts)}\n{self._measurements()}{self._use()}"

    def _measurements(self) -> str:
        if not self.results:
            return "It was not evaluated.\n\n"
        rows = [f"| {one.policy} | `{one.env}` | {one.text} | {one.episodes} |" for one in self.results]
        head = "| Policy | Environment | Success, or mean return, and 95 % interval | Episodes |\n|---|---|---|---|"
        return "\n".join(["## Results", "", head, *rows]) + "\n\n"

    def _use(self) -> str:
        env = f" --env {self._env_name}" if self._env_name else " --env NAME"
        given = _env(self.folder).get("options")
        options = f" --env.options '{without_paths(json.dumps(given))}'" if given and self._env_name else ""
        lines = [f"vla-rl inspect {self.page.name}", f"vla-rl eval {self.page.name}{env}{options}"]
        own = [one for one in reaching(self.config) if one.startswith(("the class", "the function"))]
        more = f"\nIt names {', '.join(own)}, which is its author's own: it is needed, and `--trust`.\n" if own else ""
        return "## Use\n\n```sh\n" + "\n".join(lines) + f"\n```\n{more}"


def _linked(name: str, kind: str = "") -> str:
    """A link to the page of ``owner/name@COMMIT``."""
    repository, _, commit = name.partition("@")
    return f"[{repository}](https://huggingface.co/{kind}{repository}), commit `{commit[:12]}`"


def _of_spec(spec: EnvSpec | None) -> dict[str, str]:
    """What a policy sees and does."""
    if spec is None:
        return {}
    cameras = (f"`{name}` {'×'.join(map(str, image.shape))}" for name, image in spec.images.items())
    return {
        "Instructions": listed(spec.tasks),
        "Cameras": ", ".join(cameras),
        "State, action": f"{spec.state.shape[0]} and {spec.action_dim} numbers, {1 / spec.control_dt:.3g} a second",
    }
