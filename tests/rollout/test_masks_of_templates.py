"""Which tokens are trained, over chat templates, tools and thinking: compared with files that a person can read.

In a golden file the sampled tokens stand between the marks. A change of rendering shows as a change of the file;
write them anew with RELAX_WRITE_GOLDEN=1 and read the difference.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from relax.config.run import ModelConfig
from relax.data.models import ensure_model
from relax.data.tokenizer import Tokenizer
from relax.engines.base import EngineClient, Generation
from relax.rollout.base import WorkerContext
from relax.rollout.conversation import Conversation
from relax.types import DataError, DataItem, FinishReason, Prompt, SamplingParams, Trajectory

GOLDEN = Path(__file__).parent / "golden"
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 \n:+=/[]()|_"

# In the manner of widely used templates, with this tokenizer's end token.
PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
LINES = (
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
TOOLS = (
    "{% if tools %}[system]\ntools: {% for t in tools %}{{ t.name }} {% endfor %}<eos>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}[user]\n(tool){{ m.content }}(/tool)<eos>\n"
    "{% else %}[{{ m.role }}]\n{{ m.content }}<eos>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
# Thinking stays in the last answer and is dropped from earlier ones.
THINKING = (
    "{% for m in messages %}[{{ m.role }}]\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('(/think)')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% if enable_thinking is defined and not enable_thinking %}"
    "(think)(/think){% endif %}{% endif %}"
)
# Says how many messages there are before the first: every new message changes what came before.
COUNTING = "{{ messages | length }}" + PLAIN


@dataclass(frozen=True)
class Case:
    template: str
    answers: tuple[str, ...]
    then: tuple[tuple[dict[str, str], ...], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    whole: bool = False
    """Render the whole conversation anew for each turn, in place of what follows."""
    ended: bool = True


TOOL = ({"role": "tool", "content": "7"},)
CASES = {
    "plain_one_turn": Case(PLAIN, ("hello",)),
    "cut_off_by_length": Case(PLAIN, ("hello",), ended=False),
    "plain_two_turns": Case(PLAIN, ("first", "second"), (({"role": "user", "content": "and"},),)),
    "line_ends_after_the_end_token": Case(LINES, ("first", "second"), (({"role": "user", "content": "and"},),)),
    "tool_call": Case(TOOLS, ("call 3+4", "7"), (TOOL,), (("tools", [{"name": "add"}]),)),
    "two_tool_calls": Case(TOOLS, ("call 1", "call 2", "done"), (TOOL, TOOL), (("tools", [{"name": "add"}]),)),
    "thinking_kept": Case(THINKING, ("(think)hm(/think)yes",)),
    "thinking_off": Case(THINKING, ("yes",), (), (("enable_thinking", False),)),
    "thinking_dropped_splits": Case(
        THINKING, ("(think)hm(/think)yes", "no"), (({"role": "user", "content": "sure"},),), (), whole=True
    ),
}


class Scripted:
    def __init__(self, tokenizer: Tokenizer, answers: tuple[str, ...], ended: bool) -> None:
        self.tokenizer, self.answers, self.ended = tokenizer, list(answers), ended

    async def generate(self, input_ids: Any, sampling: SamplingParams, **_: Any) -> Generation:
        ids = self.tokenizer.encode(self.answers.pop(0)) + ([self.tokenizer.eos_ids[0]] if self.ended else [])
        zeros = np.zeros(len(ids))
        return Generation(
            np.array(ids, np.int32), zeros.astype(np.float32), zeros.astype(np.int32), FinishReason.STOP, ""
        )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("templates")
    ensure_model(ModelConfig(alphabet=LETTERS, hidden_size=16, layers=1, heads=2), base / "base", 0)
    return base


def tokenizer_of(folders: Path, template: str) -> Tokenizer:
    folder = folders / f"t{abs(hash(template))}"
    if not folder.exists():
        shutil.copytree(folders / "base", folder)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return Tokenizer.load(folder)


async def run(case: Case, tokenizer: Tokenizer) -> list[Trajectory]:
    settings = dict(case.settings)
    messages: list[dict[str, str]] = [{"role": "user", "content": "ask"}]
    rendered = tuple(tokenizer.render_chat(messages, **settings))
    item = DataItem(Prompt("s", 0, 0, messages=tuple(messages)), 0, 1, rendered, SamplingParams(max_new_tokens=200))
    engine = Scripted(tokenizer, case.answers, case.ended)
    talk = Conversation(WorkerContext(cast(EngineClient, engine), tokenizer, 400, 1.0), item)
    await talk.ask()
    for answer, following in zip(case.answers, case.then, strict=False):
        messages += [{"role": "assistant", "content": answer}, *following]
        if case.whole:
            talk.go_on_from(tokenizer.render_chat(messages, **settings))
        else:
            talk.add(tokenizer.render_followup(following, **settings))
        await talk.ask()
    return talk.trajectories()


def marked(trajectory: Trajectory, tokenizer: Tokenizer) -> str:
    """The text, with the sampled parts between marks."""
    out, inside = "", False
    for token, sampled in zip(trajectory.tokens, trajectory.loss_mask, strict=True):
        if sampled != inside:
            out, inside = out + ("\u00ab" if sampled else "\u00bb"), bool(sampled)
        out += tokenizer.decode([int(token)], skip_special=False)
    return out + ("\u00bb" if inside else "")


@pytest.mark.parametrize("name", CASES)
async def test_the_mask_covers_exactly_the_sampled_tokens(name: str, folders: Path) -> None:
    """behaviour: B22 B24. The end token too, where one was sampled."""
    tokenizer = tokenizer_of(folders, CASES[name].template)
    trajectories = await run(CASES[name], tokenizer)
    for trajectory in trajectories:
        trajectory.validate()
    text = "\n--- segment ---\n".join(marked(t, tokenizer) for t in trajectories) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("RELAX_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    sampled = [tokenizer.decode(t.tokens[t.loss_mask], skip_special=False) for t in trajectories]
    end = "<eos>" if CASES[name].ended else ""
    assert "".join(sampled) == "".join(answer + end for answer in CASES[name].answers)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.then and not case.whole])
async def test_what_follows_an_answer_is_what_the_template_would_have_written(name: str, folders: Path) -> None:
    """behaviour: B22. The whole conversation rendered at once gives the same ids."""
    case = CASES[name]
    tokenizer = tokenizer_of(folders, case.template)
    [trajectory] = await run(case, tokenizer)
    messages: list[dict[str, str]] = [{"role": "user", "content": "ask"}]
    for answer, following in zip(case.answers, (*case.then, ()), strict=True):
        messages += [{"role": "assistant", "content": answer}, *following]
    last = [*tokenizer.encode(case.answers[-1]), tokenizer.eos_ids[0]]
    before = tokenizer.render_chat(messages[:-1], **dict(case.settings))
    assert trajectory.tokens.tolist() == before + last


def test_a_template_that_rewrites_earlier_turns_is_refused(folders: Path) -> None:
    """behaviour: B22"""
    with pytest.raises(DataError, match="rewrites earlier turns"):
        tokenizer_of(folders, COUNTING).render_followup(({"role": "user", "content": "and"},))
