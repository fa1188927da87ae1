"""The real packages at the other end: the vla-eval harness on both sides of its protocol, and openpi's own messages."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest

from sims.catalog import make
from sims.toy import counting
from sims.toy.counting import CountingEnv
from tests.commands import save_untrained
from tests.patience import PATIENCE
from tests.serving.openpi_style import asked
from tests.serving.served import CHUNK, counted, echo_policy, serving, serving_openpi
from tests.serving.test_remote import follow
from vla_rl.policies.tiny import TinyVLA
from vla_rl.serving import openpi, vla_eval
from vla_rl.serving.observation import SingleObservation
from vla_rl.serving.openpi import fitted
from vla_rl.serving.remote import RemotePolicy
from vla_rl.serving.served import ServedPolicy
from vla_rl.serving.vla_eval import Kind, Message

pytestmark = pytest.mark.usefixtures("harness")
OPTIONS, FIRST, EPISODES = {"deadline": 4}, 300, 2


def test_the_demos_policy_gets_its_actions_in_the_harness(tmp_path):
    """Whole episodes of lift, played by the harness: every action is the one that the policy would have taken here."""
    from vla_eval.api import run

    policy = TinyVLA.from_pretrained(save_untrained(tmp_path / "policy", **OPTIONS))
    benchmark = {
        "benchmark": "tests.serving.lift_benchmark:LiftBenchmark",
        "episodes_per_task": EPISODES,
        "params": {"first_seed": FIRST, "options": OPTIONS},
    }
    with serving(policy, seed=4) as server:
        config = {"server": {"url": server.url, "timeout": PATIENCE}, "benchmarks": [benchmark]}
        (result,) = run(config, output_dir=tmp_path / "results", no_save=True, docker=False)
    from tests.serving.lift_benchmark import LiftBenchmark

    episodes = result["tasks"][0]["episodes"]
    assert [one["episode_id"] for one in episodes] == list(range(EPISODES))
    for episode in episodes:
        assert "failure_reason" not in episode, episode
        actions, success = play(policy, FIRST + episode["episode_id"], episode["episode_id"])
        assert np.array_equal(LiftBenchmark.executed[FIRST + episode["episode_id"]], actions)
        assert (episode["steps"], episode["metrics"]["success"]) == (len(actions), success)


def play(policy: TinyVLA, seed: int, index: int) -> tuple[list[np.ndarray], bool]:
    """The episode of the harness without the harness."""
    episode = ServedPolicy(policy, 4).begin({"name": "lift", "suite": "tabletop", "episode_idx": index})
    actions: list[np.ndarray] = []
    with closing(make("lift", num_envs=1, **OPTIONS)) as env:
        obs = env.reset(np.zeros(1, int), np.array([seed]))
        while True:
            actions.append(episode.act(SingleObservation.of(obs, 0, env.spec)))
            step = env.step(actions[-1][None, None])
            obs = step.obs
            if step.done[0]:
                return actions, bool(step.success[0])


def test_a_model_server_of_the_harness_is_a_policy_here():
    """Its chunks are buffered there, per connection and episode."""
    from vla_eval.api import serve_background
    from vla_eval.model_servers.predict import PredictModelServer

    class Echo(PredictModelServer):
        def predict(self, obs: dict[str, Any], ctx: Any) -> dict[str, Any]:
            assert obs["images"]["audit"].dtype == np.uint8 and obs["task_description"] in counting.spec().tasks
            state = obs["states"]
            assert ctx.step == state[1], "its count of steps begins with our episodes"
            return {"actions": np.array([[state[1] + k, state[0]] for k in range(4)])}

    with (
        serve_background(Echo(chunk_size=4)) as server,
        closing(RemotePolicy(counting.spec(), f"vla-eval+{server.url}")) as policy,
    ):
        assert follow(policy, CountingEnv(3), [1, 2, 3], decisions=40) > 3


@pytest.mark.parametrize("form", ["raw", "png", "jpeg"])
def test_the_harness_and_we_read_each_others_messages(form):
    from vla_eval.protocol import messages, numpy_codec

    picture = np.tile(np.arange(32, dtype=np.uint8)[:, None, None], (1, 32, 3))
    payload = {**counted(), "images": {"front": picture}, "count": np.int64(3), "share": np.float32(0.5), "nested": [1]}
    before = numpy_codec.get_image_format()
    numpy_codec.set_image_format(form)
    try:
        theirs = messages.pack_message(messages.Message(messages.MessageType.OBSERVATION, payload, 7))
    finally:
        numpy_codec.set_image_format(before)
    ours = vla_eval.unpack(theirs)
    assert (ours.kind, ours.seq) == (Kind.OBSERVATION, 7) and ours.payload.keys() == payload.keys()
    assert (ours.payload["count"], ours.payload["share"], ours.payload["nested"]) == (3, 0.5, [1])
    np.testing.assert_array_equal(ours.payload["states"], payload["states"])
    off = np.abs(ours.payload["images"]["front"].astype(int) - picture)
    assert off.max() <= (8 if form == "jpeg" else 0)
    back = messages.unpack_message(vla_eval.pack(Message(Kind.ACTION, {"actions": np.ones(4, np.float32)}, 7)))
    assert back.type is messages.MessageType.ACTION and back.seq == 7 and back.payload["actions"].tolist() == [1] * 4


def test_kinds_and_version_are_the_harnesss():
    from vla_eval.protocol import messages

    assert {kind.value for kind in Kind} == {kind.value for kind in messages.MessageType}
    assert vla_eval.PROTOCOL_VERSION == messages.PROTOCOL_VERSION
    assert vla_eval.hello().keys() == messages.make_hello_payload().keys()


def test_messages_are_openpis_byte_by_byte():
    from openpi_client import msgpack_numpy

    message = {
        "observation/image": np.arange(12, dtype=np.uint8).reshape(2, 2, 3),
        "observation/state": np.linspace(0, 1, 8),
        "prompt": "lift the cube",
        "scalar": np.float32(0.25),
        "deep": {"flags": np.array([True, False]), "none": None},
    }
    assert openpi.pack(message) == msgpack_numpy.packb(message)
    ours, theirs = openpi.unpack(msgpack_numpy.packb(message)), msgpack_numpy.unpackb(openpi.pack(message))
    for read in (ours, theirs):
        np.testing.assert_array_equal(read["observation/image"], message["observation/image"])
        np.testing.assert_array_equal(read["deep"]["flags"], [True, False])
        assert read["observation/state"].dtype == np.float64 and read["prompt"] == "lift the cube"
        assert read["scalar"] == 0.25 and read["deep"]["none"] is None


def test_openpis_own_client_gets_chunks_and_its_pictures_are_fitted_as_it_does():
    from openpi_client import image_tools
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    spec = counting.spec()
    with serving_openpi(echo_policy()) as server:
        client = WebsocketClientPolicy("127.0.0.1", server.server_address[1])
        try:
            assert client.get_server_metadata()["policy"] == "FunctionPolicy"
            request = {**asked(seed=6), "observation/image": np.zeros((224, 224, 3), np.uint8)}
            for _ in range(2):
                answer = client.infer(request)
                assert answer["actions"].tolist() == [[k, 6] for k in range(CHUNK)]
            assert {"infer_ms", "prev_total_ms"} == answer["server_timing"].keys() and "policy_timing" in answer
        finally:
            client._ws.close()
    rng = np.random.default_rng(0)
    for size in ((48, 64), (64, 48), (4, 4), (7, 20), (2, 3), (4, 100)):
        picture = rng.integers(256, size=(*size, 3), dtype=np.uint8)
        found = fitted(SingleObservation({"audit": picture}, np.zeros(4), spec.tasks[0]), spec).images["audit"]
        if size != (4, 100):  # where theirs would have no pixel left, which they do not take
            np.testing.assert_array_equal(found, image_tools.resize_with_pad(picture, 4, 4))
        assert found.shape == (4, 4, 3)
