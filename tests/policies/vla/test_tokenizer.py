"""Prompts by the tokenizer of a public folder."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from tokenizers import processors

from tests.policies.vla.public_folders import word_tokenizer
from vla_rl.contract.errors import UserError
from vla_rl.policies.vla.tokenizer import TokenizerPrompts, open_tokenizer
from vla_rl.pretrained import load_module

WORDS = ("<unk>", "<bos>", "lift", "the", "red", "cube", "\n")


@pytest.fixture(autouse=True)
def fresh():
    open_tokenizer.cache_clear()


def write_tokenizer(folder: Path, bos: bool = True) -> None:
    """Every word and every line end is a token; with ``bos``, it puts ``<bos>`` in front by itself."""
    tokenizer = word_tokenizer(WORDS, lines=True)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def test_prompts_are_padded_on_the_right_with_a_mask(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokens, mask = TokenizerPrompts(str(tmp_path)).encode(["lift the red cube", "lift\n"])
    assert tokens.dtype == torch.int64 and mask.dtype == torch.bool
    assert tokens.tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 6, 0, 0, 0]]  # one line end, whether it was there or not
    assert mask.tolist() == [[True] * 6, [True] * 3 + [False] * 3]


@pytest.mark.parametrize("by_itself", [True, False])
def test_every_prompt_starts_with_one_start_token(tmp_path: Path, by_itself: bool) -> None:
    write_tokenizer(tmp_path, by_itself)
    assert TokenizerPrompts(str(tmp_path), start="<bos>").encode(["lift"])[0].tolist() == [[1, 2, 6]]
    with pytest.raises(UserError, match="no token '<s>'"):
        TokenizerPrompts(str(tmp_path), start="<s>").encode(["lift"])


def test_known_instructions_need_no_tokenizer_even_after_saving(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "base")
    prompts = TokenizerPrompts(str(tmp_path / "base"), template="{}").learn(["lift the cube", "{red} %s"])
    prompts.save_pretrained(tmp_path / "saved")
    (tmp_path / "base" / "tokenizer.json").unlink()
    open_tokenizer.cache_clear()
    loaded = load_module(tmp_path / "saved", "prompts")
    assert loaded.encode(["lift the cube"])[0].tolist() == [[1, 2, 3, 5]]
    assert (loaded.folder, loaded.template, loaded.longest) == (prompts.folder, "{}", 48)
    with pytest.raises(UserError, match=r"has no tokenizer.json.*copy it into the folder"):
        loaded.encode(["lift the red cube"])


def test_the_one_on_the_hub_is_used_where_the_folder_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokenizer(tmp_path / "cache")
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *given: asked.append(given) or tmp_path / "cache" / "tokenizer.json"
    )
    assert TokenizerPrompts(str(tmp_path), "some/model").encode(["lift"])[0].tolist() == [[1, 2, 6]]
    assert asked == [("some/model", "tokenizer.json")]


def test_a_tokenizer_that_cannot_be_had_is_said_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, file: str) -> str:
        raise LocalEntryNotFoundError("no connection\nand more lines")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(UserError, match=r"\(no connection\).*copy tokenizer.json of some/model into the folder\.$"):
        TokenizerPrompts(str(tmp_path), "some/model").encode(["lift"])
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"tokenizer.json' is no tokenizer that can be read.*download it again"):
        TokenizerPrompts(str(tmp_path), "some/model").encode(["lift"])


def test_an_instruction_of_too_many_tokens_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    with pytest.raises(UserError, match="has 6 tokens, but the model was trained with at most 5"):
        TokenizerPrompts(str(tmp_path), longest=5).encode(["lift the red cube"])


def test_a_template_is_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    plain, odd = (TokenizerPrompts(str(tmp_path), template=one) for one in ("{}\n", "{}\n{0.__class__}"))
    assert len(odd.encode(["lift"])[0][0]) == len(plain.encode(["lift"])[0][0]) + 1
