"""A policy behind somebody's server, asked as a policy of ours: same outcomes, or one sentence about what is wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import websockets.sync.server
from websockets.exceptions import ConnectionClosed

from sims.toy import counting, point_mass
from sims.toy.counting import CountingEnv
from sims.toy.point_mass import PointMassEnv
from tests.patience import PATIENCE
from tests.serving.served import CHUNK, echo_policy, homewards, serving, serving_openpi
from vla_rl.contract.check import check_policy
from vla_rl.contract.errors import ContractError, UserError
from vla_rl.evaluation.run import evaluate
from vla_rl.experience.driver import Driver
from vla_rl.policies.function import FunctionPolicy
from vla_rl.policies.pretrained import load_policy
from vla_rl.recipes.env_config import EnvConfig
from vla_rl.recipes.policies import start_policy
from vla_rl.serving import openpi, vla_eval
from vla_rl.serving.access import Address, names_server
from vla_rl.serving.observation import SingleObservation
from vla_rl.serving.remote import RemotePolicy
from vla_rl.serving.vla_eval import Kind, Message


@contextmanager
def listening(handler: Callable[[Any], None]) -> Iterator[str]:
    """HOST:PORT of a server of another implementation that gives each connection to ``handler``."""

    def quietly(connection: Any) -> None:
        with suppress(ConnectionClosed):
            handler(connection)

    with websockets.sync.server.serve(quietly, "127.0.0.1", 0, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join(PATIENCE)


def openpi_server(answer: Callable[[dict[str, Any]], Any]) -> Callable[[Any], None]:
    """A server that introduces itself and answers every request, with a text where ``answer`` returns one."""

    def handler(connection: Any) -> None:
        connection.send(openpi.pack({"robot": "toy"}))
        for data in connection:
            found = answer(openpi.unpack(data))
            connection.send(found if isinstance(found, str) else openpi.pack(found))

    return handler


def chunk_of_five(request: dict[str, Any]) -> dict[str, Any]:
    """(steps + k, seed) for k of 0 to 4, as float64, from openpi's keys; checks what it is sent."""
    image, state = request["observation/image"], request["observation/state"]
    assert image.shape == (4, 4, 3) and image.dtype == np.uint8 and image[0, 0, 0] == state[1]
    assert request["prompt"] == counting.spec().tasks[int(state[0]) % 2]
    return {"actions": np.array([[state[1] + k, state[0]] for k in range(5)], np.float64), "server_timing": {"ms": 1.0}}


def follow(policy: Any, env: CountingEnv, seeds: list[int], decisions: int = 30) -> int:
    """Play; every action must be (time, seed) of its environment.  Returns how many episodes ended."""
    driver, ended = Driver(env, policy, None, "eval"), 0
    driver.start(seeds)
    queue = iter(range(100, 200))
    for _ in range(decisions):
        before = driver.obs
        decision = driver.step()
        action = np.asarray(decision.out.action)
        steps = before.time[:, None] + np.arange(action.shape[1])
        assert np.array_equal(action[..., 0], steps) and np.array_equal(action[..., 1], before.state[:, :1] + 0 * steps)
        over = np.flatnonzero(decision.step.done)
        ended += len(over)
        driver.reset(over, [next(queue) for _ in over])
    return ended


@pytest.mark.parametrize("options", ["", "?replan_steps=2", "?replan_steps=5&answer_s=60"])
def test_openpi_every_environment_gets_its_own_chunk(options):
    with (
        listening(openpi_server(chunk_of_five)) as host,
        closing(RemotePolicy(counting.spec(), f"ws://{host}{options}")) as policy,
    ):
        horizon = 2 if "=2" in options else 5
        assert follow(policy, CountingEnv(3), [1, 2, 3]) > 3
        driver = Driver(CountingEnv(1), policy, None, "eval")
        driver.start([4])
        assert driver.step().out.action.shape == (1, horizon, 2)


def test_vla_eval_every_environment_has_a_session_whose_episodes_begin_with_ours():
    with (
        serving(echo_policy()) as server,
        closing(RemotePolicy(counting.spec(), f"vla-eval+{server.url}")) as policy,
    ):
        assert follow(policy, CountingEnv(4), [1, 2, 3, 4]) > 3, f"chunks of {CHUNK} end in mid-episode as well"


def test_a_session_belongs_to_its_environment_also_when_each_decides_alone():
    """As in an evaluation that decides one by one, and with two drivers that take turns."""
    with (
        serving(echo_policy()) as server,
        closing(RemotePolicy(counting.spec(), f"vla-eval+{server.url}")) as policy,
    ):
        envs = [CountingEnv(1) for _ in range(3)]
        drivers = [Driver(env, policy, None, "eval") for env in envs]
        for seed, driver in enumerate(drivers):
            driver.start([2 * seed])
        for step in range(3):
            for seed, driver in enumerate(drivers):
                assert driver.step().out.action.tolist() == [[[step, 2.0 * seed]]]


def test_connections_that_nobody_uses_are_closed():
    with (
        serving(echo_policy(), max_connections=24) as server,
        closing(RemotePolicy(counting.spec(), f"vla-eval+{server.url}")) as policy,
    ):
        for seed in range(20):
            driver = Driver(CountingEnv(2), policy, None, "eval")
            driver.start([seed, seed + 1])
            assert driver.step().out.action[:, 0, 1].tolist() == [seed, seed + 1]


def state_only(obs: SingleObservation) -> dict[str, Any]:
    """A layout of the user's own."""
    return {"state": obs.state, "prompt": obs.instruction}


def only_state(request: dict[str, Any]) -> SingleObservation:
    """What ``state_only`` writes."""
    return SingleObservation({}, request["state"], request["prompt"])


def test_an_evaluation_through_either_protocol_says_what_one_in_this_process_says():
    env, seeds = PointMassEnv(3), list(range(7))
    local = FunctionPolicy(point_mass.spec(), homewards)
    wanted = evaluate(env, local, seeds)
    assert wanted.success.any()
    layout = "?layout=tests.serving.test_remote:state_only"
    with serving(local) as harness, serving_openpi(local, layout=only_state) as openpis:
        for address in (f"vla-eval+{harness.url}", openpis.url + layout):
            with closing(RemotePolicy(point_mass.spec(), address)) as policy:
                found = evaluate(env, policy, seeds)
            assert np.array_equal(found.returns, wanted.returns) and found.cause == wanted.cause


def test_it_keeps_the_contract_and_is_found_again_by_its_checkpoint(tmp_path):
    env = PointMassEnv(2)
    with serving(FunctionPolicy(point_mass.spec(), homewards)) as server:
        address = f"vla-eval+{server.url}"
        with closing(RemotePolicy(env.spec, address)) as policy:
            check_policy(policy, env, None)
            policy.save_pretrained(tmp_path / "remote")
        with closing(load_policy(tmp_path / "remote", env.spec)) as again:
            assert isinstance(again, RemotePolicy) and again.address == policy.address
            assert evaluate(env, again, [3]).success.all()
        with pytest.raises(ContractError, match="was trained for"):
            load_policy(tmp_path / "remote", counting.spec())


def test_a_run_does_not_start_from_a_server():
    with pytest.raises(UserError, match="has no weights here, so it cannot be trained"):
        start_policy("ws://127.0.0.1:1", EnvConfig("point_mass"), seed=1)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def fails(handler: Callable[[Any], None], match: str, address: str = "ws://{}", spec: Any = None) -> None:
    """A decision of the policy behind ``handler`` raises a UserError that says ``match``."""
    env = CountingEnv(2)
    with (
        listening(handler) as host,
        pytest.raises(UserError, match=match) as error,
        closing(RemotePolicy(spec or env.spec, address.format(host))) as policy,
    ):
        driver = Driver(env, policy, None, "eval")
        driver.start([1, 2])
        driver.step()
    assert str(error.value).endswith(".")


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (lambda _: {"actions": np.zeros((5, 7))}, r"actions of shape \[5, 7\], but the environment takes \[H,2\]"),
        (lambda _: {"actions": np.full((5, 2), np.nan)}, "not finite"),
        (lambda _: {"action": np.zeros((5, 2))}, r"has no actions \[H,D\] \(among \['action'\]\)"),
        (lambda _: {"actions": [[0.0, 0.0]]}, r"has no actions"),
        (lambda _: 'Traceback ...\nKeyError: "observation/image"\n', 'KeyError: "observation/image"'),
        (lambda _: "", "an empty text"),
    ],
)
def test_an_answer_that_is_no_chunk_is_said(answer, match):
    fails(openpi_server(answer), match)


def test_a_chunk_that_is_shorter_than_what_should_be_executed_is_said():
    short = openpi_server(lambda _: {"actions": np.zeros((5, 2))})
    fails(short, "H of at least 8", "ws://{}?replan_steps=8")


def test_a_server_that_hangs_up_is_said():
    def leaving(connection: Any) -> None:
        connection.send(openpi.pack({}))
        connection.recv()

    fails(leaving, r"closed the connection|broke the connection")


def silent(connection: Any) -> None:
    for _ in connection:
        pass


def test_a_server_that_does_not_answer_is_given_up():
    fails(silent, r"did not introduce itself as openpi's .* write vla-eval\+ws://", "ws://{}?answer_s=0.3")
    fails(silent, "sent nothing for too long", "vla-eval+ws://{}?answer_s=0.3")


def test_the_other_protocol_is_said():
    fails(openpi_server(chunk_of_five), "lacks type, payload, seq or timestamp", "vla-eval+ws://{}")

    def greeting(connection: Any) -> None:
        connection.send("hello")

    fails(greeting, "did not introduce itself|instead of sending its metadata")


def model_server(answer: Callable[[Message], Message | None], version: int = 1) -> Callable[[Any], None]:
    """A model server of the harness whose answers to observations are those of ``answer``."""

    def handler(connection: Any) -> None:
        for data in connection:
            message = vla_eval.unpack(data)
            if message.kind is Kind.HELLO:
                hello = {**vla_eval.hello(), "protocol_version": version}
                connection.send(vla_eval.pack(Message(Kind.HELLO, hello, message.seq)))
            elif message.kind is Kind.OBSERVATION and (found := answer(message)):
                connection.send(vla_eval.pack(found))

    return handler


ZEROS = {"actions": np.zeros(2)}


@pytest.mark.parametrize(
    ("handler", "match"),
    [
        (model_server(lambda one: Message(Kind.ERROR, {"error": "no GPU"}, one.seq)), "failed \\('no GPU'\\)"),
        (model_server(lambda one: Message(Kind.ACTION, ZEROS, one.seq + 1)), "answered message 3 with action 4"),
        (model_server(lambda one: Message(Kind.HELLO, ZEROS, one.seq)), "with hello 3 instead of action"),
        (model_server(lambda one: Message(Kind.ACTION, ZEROS, one.seq), version=2), "speaks version 2"),
        (model_server(lambda one: Message(Kind.ACTION, {"actions": np.zeros(3)}, one.seq)), r"shape \[1, 3\]"),
    ],
)
def test_a_model_server_that_fails_is_said(handler, match):
    fails(handler, match, "vla-eval+ws://{}")


def test_a_model_server_is_told_when_episodes_begin_and_end():
    said: list[list[str]] = []

    def handler(connection: Any) -> None:
        said.append(mine := [])

        class Noted:
            def __iter__(self) -> Iterator[bytes]:
                for data in connection:
                    message = vla_eval.unpack(data)
                    mine.append(message.kind.value)
                    known = message.payload.get("task", {}).get("name") in counting.spec().tasks
                    assert known or message.kind is not Kind.EPISODE_START
                    yield data

            send = connection.send

        model_server(lambda one: Message(Kind.ACTION, ZEROS, one.seq))(Noted())

    env = CountingEnv(2)
    with listening(handler) as host, closing(RemotePolicy(env.spec, f"vla-eval+ws://{host}")) as policy:
        driver = Driver(env, policy, None, "eval")
        driver.start([1, 2])
        driver.step()
        driver.reset(np.array([1]), np.array([5]))
        driver.step()
    one, other = sorted(said, key=len)
    assert one == ["hello", "episode_start", "observation", "observation"]
    assert other == ["hello", "episode_start", "observation", "episode_end", "episode_start", "observation"]


# -- addresses ---------------------------------------------------------------------------------------------------------


def test_an_address_is_read():
    assert Address.parse("ws://robot:8000/x?replan_steps=5") == Address("openpi", "ws://robot:8000/x", 5)
    assert Address.parse("vla-eval+wss://robot?layout=a:b&answer_s=2.5") == Address(
        "vla-eval", "wss://robot", layout="a:b", answer_s=2.5
    )
    assert names_server("wss://x") and names_server("vla-eval+ws://x:1")
    for other in ("runs/demo", "package.module:Class", "http://x", "ws:x", "C:/runs"):
        assert not names_server(other)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("ws://", "is no address of a policy server"),
        ("ws://x?replan=5", "did you mean 'replan_steps'?"),
        ("ws://x?replan_steps=five", "is 'five'; write a number"),
        ("ws://x?replan_steps=-1", "have no meaning"),
        ("ws://x?answer_s=nan", "have no meaning"),
        ("ws://x?answer_s=inf", "have no meaning"),
    ],
)
def test_an_address_that_cannot_be_used_is_said(address, sentence):
    with pytest.raises(UserError) as refused:
        Address.parse(address)
    assert sentence in str(refused.value)
