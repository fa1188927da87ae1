"""The judge with a vision-language model: its questions, when it asks them, and the answers of a small real model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_rl.contract.errors import ContractError, UserError
from vla_rl.rewards.judge import BASELINE_PROMPT, VLMConfig, VLMJudge, VLMJudgeConfig, YesNo
from vla_rl.rewards.reward_model import Reward, load_reward

WORDS = [*("yes", "Yes", "no", "maybe", "user", "assistant", "lift", "push", "the", "red", "blue", "cube"), *"?:"]
WORDS += ["is", "it", "done"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image> {% else %}{{ c['text'] }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)
PROMPT = "{task} ? is it done ?"


# -- when it asks, and its progress and done --------------------------------------------------------------------------


class ByBrightness:
    """P(yes) is the first pixel of the last camera as a percentage; records the questions."""

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[str, ...], list[int], list[str]]] = []

    def probability(self, images, question):
        first = np.asarray(images[list(images)[-1]])[:, 0, 0, 0]
        self.asked.append((tuple(images), first.tolist(), list(question)))
        return (first / 100).astype(np.float32)


def clip(brightness: np.ndarray, *cameras: str) -> dict[str, np.ndarray]:
    picture = np.zeros((*brightness.shape, 2, 2, 3), np.uint8)
    picture[:, :, 0, 0, 0] = brightness
    return {name: picture for name in cameras or ("front",)}


def by_hand(percent: np.ndarray, valid: np.ndarray, stride: int) -> tuple[list[float], list[int]]:
    """Progress of one environment, and the frames with a question."""
    progress, asked, frames_so_far, last = [], [], 0, 0.0
    for t in range(len(valid)):
        if valid[t]:
            if frames_so_far % stride == 0:
                last = percent[t] / 100
                asked.append(int(percent[t]))
            frames_so_far += 1
        progress.append(last)
    return progress, asked


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("cuts", [[], [1], [4, 5], [2, 3, 9]])
def test_every_few_frames_are_evaluated_in_any_chunks(stride, cuts):
    rng = np.random.default_rng(stride)
    percent, valid = rng.integers(1, 100, (6, 12)), rng.random((6, 12)) < 0.7
    model = ByBrightness()
    judge = VLMJudge(VLMJudgeConfig(stride=stride, threshold=0.6), model)
    state, parts = judge.initial_state(6), []
    for part in np.split(np.arange(12), cuts):
        output, state = judge.evaluate(clip(percent[:, part]), ["it"] * 6, valid[:, part], state)
        parts.append((output.progress, output.done))
    progress, done = (np.concatenate(found, 1) for found in zip(*parts, strict=True))
    want = [by_hand(p, v, stride) for p, v in zip(percent, valid, strict=True)]
    np.testing.assert_allclose(progress, [row for row, _ in want], rtol=1e-6)
    assert np.array_equal(done, progress >= np.float32(0.6)) and progress.dtype == np.float32
    asked = [pixel for _, pixels, _ in model.asked for pixel in pixels]
    assert sorted(asked) == sorted(pixel for _, pixels in want for pixel in pixels)


def test_the_question_contains_the_instruction():
    model = ByBrightness()
    judge = VLMJudge(VLMJudgeConfig(cameras=("wrist", "front"), stride=1), model)
    frames = clip(np.array([[10, 20], [30, 40]]), "front", "side", "wrist")
    judge.evaluate(frames, ["lift {it}", "push"], np.ones((2, 2), bool), judge.initial_state(2))
    (cameras, pixels, questions), *more = model.asked
    assert cameras == ("wrist", "front") and pixels == [10, 20, 30, 40] and not more
    assert questions == [BASELINE_PROMPT.replace("{task}", text) for text in ("lift {it}", "lift {it}", "push", "push")]
    with pytest.raises(ContractError, match=r"the judge needs \['wrist'\] but the frames are of \['front'\]"):
        judge.evaluate(clip(np.zeros((1, 1))), ["push"], np.ones((1, 1), bool), judge.initial_state(1))
    with pytest.raises(UserError, match=r"does not contain \{task\}"):
        VLMJudge(VLMJudgeConfig(prompt="Is it done?"), model)


def test_the_threshold_is_inclusive():
    judge = VLMJudge(VLMJudgeConfig(stride=1, threshold=0.5), ByBrightness())
    output, _ = judge.evaluate(clip(np.array([[49, 50, 51]])), ["it"], np.ones((1, 3), bool), judge.initial_state(1))
    assert output.done.tolist() == [[False, True, True]]
    lax = VLMJudge(VLMJudgeConfig(stride=1, threshold=0.0), ByBrightness())
    unseen = np.array([[False, True]])
    output, _ = lax.evaluate(clip(np.array([[9, 9]])), ["it"], unseen, lax.initial_state(1))
    assert output.done.tolist() == [[False, True]]


def test_a_row_that_is_reset_is_asked_about_anew_and_no_other():
    model = ByBrightness()
    judge = VLMJudge(VLMJudgeConfig(stride=4, threshold=0.5), model)
    yes = np.ones((3, 2), bool)
    _, state = judge.evaluate(clip(np.full((3, 2), 70)), ["it"] * 3, yes, judge.initial_state(3))
    kept = {name: value.copy() for name, value in state.items()}
    output, _ = judge.evaluate(clip(np.full((3, 2), 20)), ["it"] * 3, yes, judge.reset_state(state, np.array([1])))
    np.testing.assert_allclose(output.progress, [[0.7, 0.7], [0.2, 0.2], [0.7, 0.7]], rtol=1e-6)
    assert [pixels for _, pixels, _ in model.asked] == [[70, 70, 70], [20]] and isinstance(judge, Reward)
    assert all(np.array_equal(state[name], kept[name]) for name in kept), "the caller's state is not changed"


# -- a real model, small and untrained --------------------------------------------------------------------------------


def llava(folder: Path, words: list[str] = WORDS, template: str | None = TEMPLATE) -> Path:
    """LLaVA (a CLIP eye of four patches, a Llama of two layers) with large random weights, so that answers differ."""
    tokenizers, package = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    index = {word: i for i, word in enumerate(["<unk>", "<pad>", "<image>", *words])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(index, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "additional_special_tokens": ["<image>"]}
    tokenizer = package.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    encoder = package.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    package.LlavaProcessor(
        encoder,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    ).save_pretrained(folder)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = package.LlavaConfig(
        vision_config=package.CLIPVisionConfig(**size, image_size=16, patch_size=8, initializer_range=0.3),
        text_config=package.LlamaConfig(**size, vocab_size=len(index), initializer_range=0.3),
        image_token_index=index["<image>"],
    )
    torch.manual_seed(0)
    package.LlavaForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    return llava(tmp_path_factory.mktemp("vlm"))


def asker(folder: Path, batch: int = 8) -> YesNo:
    return YesNo(VLMConfig(model=str(folder), batch=batch))


def pictures(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 256, (count, 20, 24, 3)).astype(np.uint8) for name in ("front", "wrist")}


QUESTIONS = ["lift the red cube ? is it done ?", "push the blue cube ?"]


def test_the_answer_is_that_of_the_next_token_by_hand(model_folder):
    """One question without our code: its tokens written down, the pictures through CLIP's own preprocessing."""
    import transformers

    images = pictures(1)
    found = asker(model_folder).probability(images, [QUESTIONS[1]])
    words = ["user", ":", *["<image>"] * 8, "push", "the", "blue", "cube", "?", "assistant", ":"]  # two of four patches
    index = {word: i for i, word in enumerate(["<unk>", "<pad>", "<image>", *WORDS])}
    ids = torch.tensor([[index[word] for word in words]])
    encoder = transformers.CLIPImageProcessor.from_pretrained(model_folder)
    pixels = encoder([images["front"][0], images["wrist"][0]], return_tensors="pt")["pixel_values"]
    model = transformers.LlavaForConditionalGeneration.from_pretrained(model_folder).eval()
    with torch.no_grad():
        share = model(input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels).logits[0, -1].softmax(-1)
    yes, no = share[index["yes"]] + share[index["Yes"]], share[index["no"]]
    assert found[0] == pytest.approx(float(yes / (yes + no)), rel=1e-4) and 0.01 < found[0] < 0.99
    assert found.dtype == np.float32


def test_answers_do_not_depend_on_the_batch(model_folder):
    images = pictures(5)
    question = [QUESTIONS[i % 2] for i in range(5)]
    together = asker(model_folder).probability(images, question)
    for batch in (1, 2):
        np.testing.assert_allclose(asker(model_folder, batch).probability(images, question), together, rtol=1e-4)
    one = asker(model_folder)
    for i in range(5):
        alone = one.probability({name: image[i : i + 1] for name, image in images.items()}, [question[i]])
        np.testing.assert_allclose(alone[0], together[i], rtol=1e-4)
    assert len(set(together.round(4).tolist())) == 5
    swapped = one.probability(images, [QUESTIONS[(i + 1) % 2] for i in range(5)])
    assert np.abs(swapped - together).min() > 1e-4
    switched = one.probability(dict(reversed(images.items())), question)
    assert np.abs(switched - together).max() > 1e-3, "the order of the cameras counts"


def test_a_judge_comes_back_and_follows_its_model(model_folder, tmp_path):
    config = VLMJudgeConfig(VLMConfig(model=str(model_folder)), ("wrist",), PROMPT, stride=2, threshold=0.4)
    VLMJudge.from_config(config).save_pretrained(tmp_path / "judge")
    judge = load_reward(tmp_path / "judge")
    assert type(judge) is VLMJudge and judge.config == config
    images = pictures(6)
    frames = {name: image.reshape(2, 3, *image.shape[1:]) for name, image in images.items()}
    text = ["lift the red cube", "push the blue cube"]
    output, _ = judge.evaluate(frames, text, np.ones((2, 3), bool), judge.initial_state(2))
    asked = [f"{text[i]} ? is it done ?" for i in (0, 0, 1, 1)]
    want = asker(model_folder).probability({"wrist": images["wrist"][[0, 2, 3, 5]]}, asked)
    np.testing.assert_allclose(output.progress, want[[[0, 0, 1], [2, 2, 3]]], rtol=1e-4)
    assert np.array_equal(output.done, output.progress >= 0.4)


def test_a_model_that_cannot_be_asked_is_refused_in_one_sentence(tmp_path):
    for folder, why in (
        (llava(tmp_path / "deaf", template=None), "has no chat template"),
        (llava(tmp_path / "mute", [word for word in WORDS if word != "no"]), "no single token for 'no'"),
        (tmp_path / "nowhere", "cannot be loaded"),
    ):
        with pytest.raises(UserError, match=why) as caught:
            asker(folder)
        assert len(str(caught.value)) < 900


def test_weights_of_pickle_are_not_read(tmp_path):
    folder = llava(tmp_path / "vlm")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(UserError, match=r"cannot be loaded \(.*safetensors"):
        asker(folder)


def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    folder = llava(tmp_path / "vlm")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "theirs",
        "auto_map": {"AutoConfig": "theirs.C", "AutoModelForImageTextToText": "theirs.M"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: ...\nclass M: ...\n")
    with pytest.raises(UserError, match="cannot be loaded"):
        asker(folder)
    assert not (tmp_path / "ran").exists()
