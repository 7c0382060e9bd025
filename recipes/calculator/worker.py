"""A sample of two turns: the policy calls a calculator, then answers with what it said.

3+4>  3+4=  07#  07<eos>
prompt  call   tool  answer          sampled by the policy: call and answer
"""

from __future__ import annotations

import re

from relax.rollout.base import WorkerContext
from relax.rollout.conversation import Conversation
from relax.types import DataItem, Trajectory

CALL_TOKENS = 5
ANSWER_TOKENS = 3


class CalculatorWorker:
    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    async def step(self, item: DataItem) -> list[Trajectory]:
        talk = Conversation(self.context, item)
        called = await talk.ask(max_new_tokens=CALL_TOKENS, stop=("=",))
        call = self.context.tokenizer.decode(called.output_ids)
        talk.add(self.context.tokenizer.encode(calculate(call)))
        answered = await talk.ask(max_new_tokens=ANSWER_TOKENS)
        return talk.trajectories(response=self.context.tokenizer.decode(answered.output_ids), call=call)


def calculate(call: str) -> str:
    """The tool: two digits of the sum that `call` asks for, or "##" when it asks for none."""
    found = re.fullmatch(r"(\d)\+(\d)=", call)
    return "###" if found is None else f"{int(found[1]) + int(found[2]):02d}#"
