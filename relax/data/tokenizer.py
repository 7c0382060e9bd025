"""A Hugging Face tokenizer folder as the rest of the project sees it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from relax.types import DataError, ModelError, Prompt


class Tokenizer:
    """Renders prompts to token ids and ids back to text.

    `eos_ids` are all end tokens: the tokenizer's own first, then those of generation_config.json
    and config.json. `pad_id` is the padding token, else the first end token. `vocab_size` counts
    the ids that the tokenizer knows; the model's embedding may be larger.
    """

    def __init__(self, hf: Any, path: Path, eos_ids: tuple[int, ...]) -> None:
        self._hf = hf
        self.path = path
        self.eos_ids = eos_ids
        self.pad_id: int = int(hf.pad_token_id) if hf.pad_token_id is not None else eos_ids[0]
        self.vocab_size: int = len(hf)

    @classmethod
    def load(cls, path: Path | str, *, trust_remote_code: bool = False) -> Tokenizer:
        """Open the tokenizer in a model folder. Raises `ModelError` when it is missing or broken."""
        from transformers import AutoTokenizer  # loads torch: whoever only names this class does not

        folder = Path(path)
        if not folder.is_dir():
            raise ModelError(f"tokenizer folder {folder} does not exist")
        try:
            hf = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=trust_remote_code, use_fast=True
            )
        except Exception as error:
            # The library lets whatever its file readers raise through, `Exception` itself included.
            raise ModelError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
        eos_ids = _end_tokens(hf, folder)
        if not eos_ids:
            raise ModelError(f"the tokenizer in {folder} has no end token (eos_token): generation would never stop")
        return cls(hf, folder, eos_ids)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def render(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: messages through the chat template, ready for the answer; text as it is.

        Raises `DataError` for messages without a chat template and for text that the tokenizer cannot encode.
        """
        if prompt.messages is None:
            if prompt.text is None:
                raise DataError(f"prompt {prompt.group_id} has neither messages nor text")
            return self._ids(prompt.text, add_special_tokens=True)
        # The template writes the special tokens itself; adding them again would double the BOS.
        return self._ids(self._chat(prompt.messages, f"prompt {prompt.group_id}", True), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> list[int]:
        """Token ids of a whole conversation, ready for the next answer. `settings` go to the template (`tools`,
        `enable_thinking`). A template may drop parts of earlier turns: see `Conversation.go_on_from`. Raises as
        `render`."""
        return self._ids(self._chat(messages, "a conversation", True, **settings), add_special_tokens=False)

    def render_followup(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> list[int]:
        """Token ids that follow an answer which the policy sampled to its end token, when `messages` (a tool's
        output, a user's next turn) come after it, ready for the next answer.

        The sampled ids are left as they are: only what the template puts behind them is rendered. Raises
        `DataError` for a template that writes an earlier turn differently once another follows, and as `render`.
        """
        before = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
        closed = self._chat(before, "a conversation", False, **settings)
        whole = self._chat([*before, *messages], "a conversation", True, **settings)
        if not whole.startswith(closed):
            raise DataError(
                f"the chat template of {self.path} rewrites earlier turns when a message follows: render the whole "
                "conversation (render_chat) and go on from that, which may split the trajectory"
            )
        end = str(self._hf.eos_token)
        last = closed.rfind(end)
        cut = len(closed) if last < closed.rfind("a") else last + len(end)
        return self._ids(whole[cut:], add_special_tokens=False)

    def _chat(self, messages: Sequence[Mapping[str, Any]], whose: str, answer: bool, **settings: Any) -> str:
        if not self.has_chat_template:
            raise DataError(
                f"{whose} has messages but the tokenizer in {self.path} has no chat template: "
                "give the data as `prompt` text, or use a model folder with a chat template (chat_template.jinja)"
            )
        try:
            return str(
                self._hf.apply_chat_template(
                    [dict(message) for message in messages], tokenize=False, add_generation_prompt=answer, **settings
                )
            )
        except jinja2.TemplateError as error:
            raise DataError(f"the chat template of {self.path} refuses the messages of {whose}: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a text without any special token added."""
        return self._ids(text, add_special_tokens=False)

    def vocabulary(self) -> dict[str, int]:
        """Token text -> id, added tokens included."""
        return dict(self._hf.get_vocab())

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        plain = [int(i) for i in ids]
        return str(self._hf.decode(plain, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            ids: Sequence[int] = self._hf(text, add_special_tokens=add_special_tokens)["input_ids"]
        except Exception as error:
            # The Rust tokenizers raise a bare `Exception` for a character outside the vocabulary.
            raise DataError(
                f"the tokenizer in {self.path} cannot encode {_shorten(text)}: {error}; "
                "does it hold a character that the model's alphabet lacks?"
            ) from error
        return [int(i) for i in ids]


def check_same_vocabulary(policy: Tokenizer, teacher: Tokenizer) -> None:
    """Raise `ModelError` unless every id of the policy means the same token to the teacher."""
    own, other = policy.vocabulary(), teacher.vocabulary()
    differing = [token for token, number in own.items() if other.get(token) != number]
    if differing:
        raise ModelError(
            f"the tokenizer in {teacher.path} is not the policy's ({policy.path}): {len(differing)} tokens differ, "
            f"{', '.join(map(_shorten, differing[:3]))} among them; a teacher must read the policy's token ids"
        )


def _end_tokens(hf: Any, folder: Path) -> tuple[int, ...]:
    found: list[int] = [] if hf.eos_token_id is None else [int(hf.eos_token_id)]
    for name in ("generation_config.json", "config.json"):
        value = _read_object(folder / name).get("eos_token_id")
        found.extend(int(v) for v in (value if isinstance(value, list) else [value]) if v is not None)
    return tuple(dict.fromkeys(found))


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    return data if isinstance(data, dict) else {}


def _shorten(text: str, limit: int = 60) -> str:
    return ascii(text if len(text) <= limit else text[: limit - 3] + "...")
