"""Reinforcement-learning post-training of language models: the library behind the services."""

import os

# Progress bars of the model libraries would fill service logs and mix with the commands' output.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
