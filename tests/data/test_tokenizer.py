from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from relax.data.tokenizer import Tokenizer
from relax.types import DataError, ModelError, Prompt

USER = {"role": "user", "content": "hi"}


def test_messages_are_rendered_by_the_chat_template_ready_for_the_answer(chat: Tokenizer) -> None:
    ids = chat.render(Prompt("s", 0, 0, messages=(USER,)))
    assert chat.decode(ids, skip_special=False) == "<bos>user:hi<eos><bos>assistant:"
    assert ids.count(chat.eos_ids[0]) == 1


def test_text_is_encoded_as_it_is(plain: Tokenizer) -> None:
    ids = plain.render(Prompt("s", 0, 0, text="314>"))
    assert plain.decode(ids, skip_special=False) == "314>"
    assert ids == plain.encode("314>")


def test_text_gets_a_bos_where_the_tokenizer_adds_one(plain_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(plain_folder, tmp_path / "m")
    path = tmp_path / "m" / "tokenizer.json"
    data = json.loads(path.read_text())
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [1], "tokens": ["<bos>"]}},
    }
    path.write_text(json.dumps(data))
    tokenizer = Tokenizer.load(tmp_path / "m")
    assert tokenizer.render(Prompt("s", 0, 0, text="3")) == [1, *tokenizer.encode("3")]


def test_messages_without_a_chat_template_say_what_to_do(plain: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"no chat template: give the data as `prompt` text, or use a model folder"):
        plain.render(Prompt("s", 0, 0, messages=(USER,)))


def test_messages_that_the_template_refuses_give_its_words(chat: Tokenizer) -> None:
    with pytest.raises(DataError, match="role forbidden is not allowed"):
        chat.render(Prompt("s", 0, 0, messages=({"role": "forbidden", "content": "x"},)))


def test_a_character_outside_the_alphabet_is_an_error_and_not_dropped(plain: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"cannot encode '3\\xe94'.*alphabet"):
        plain.encode("3é4")


def test_decode_hides_special_tokens_unless_asked(plain: Tokenizer) -> None:
    ids = [*plain.encode("ab"), plain.eos_ids[0]]
    assert plain.decode(ids) == "ab"
    assert plain.decode(ids, skip_special=False) == "ab<eos>"


def test_end_tokens_of_all_configuration_files_count(plain_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(plain_folder, tmp_path / "m")
    (tmp_path / "m" / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    tokenizer = Tokenizer.load(tmp_path / "m")
    assert tokenizer.eos_ids == (2, 7)
    assert tokenizer.pad_id == 0


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere does not exist"):
        Tokenizer.load(tmp_path / "nowhere")


def test_a_broken_tokenizer_file_is_a_model_error(plain_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(plain_folder, tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"the tokenizer in .*m cannot be loaded"):
        Tokenizer.load(tmp_path / "m")


def test_a_tokenizer_without_end_token_is_refused(plain_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(plain_folder, tmp_path / "m")
    settings = tmp_path / "m" / "tokenizer_config.json"
    settings.write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>"}))
    for name in ("config.json", "generation_config.json"):
        data = json.loads((tmp_path / "m" / name).read_text())
        data.pop("eos_token_id", None)
        (tmp_path / "m" / name).write_text(json.dumps(data))
    with pytest.raises(ModelError, match="no end token"):
        Tokenizer.load(tmp_path / "m")
