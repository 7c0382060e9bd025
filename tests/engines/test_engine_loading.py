"""From a model folder to a running engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from relax.config.roles import EngineConfig
from relax.config.run import ModelConfig
from relax.data.models import ensure_model
from relax.engines.client import SglangClient
from relax.engines.embedded import load_engine
from relax.engines.service import EngineService
from relax.engines.transports import LocalTransport
from relax.types import ModelError, PolicyVersion, SamplingParams
from relax.weights.store import WeightStore


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_engine_over_a_model_folder_adopts_a_published_version_and_generates(
    tmp_path: Path, dtype: str
) -> None:
    """behaviour: B2"""
    folder = ensure_model(ModelConfig(), tmp_path / "model", 1)
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    store = WeightStore(tmp_path / "weights", keep=2)
    manifest = store.publish(PolicyVersion(0), 0, trained.named_parameters(), 1 << 20)
    engine = load_engine(folder, EngineConfig(slots=4, dtype=dtype), max_context=48, threads=1)  # type: ignore[arg-type]
    engine.start()
    client = SglangClient(LocalTransport(EngineService(engine)))
    path = str(tmp_path / "weights" / "v00000000")
    report = await client.update_weights_from_disk(path, PolicyVersion(0), deadline_s=30)
    assert report.digest == manifest.digest
    prompt = np.array([1, 2, 3], dtype=np.int32)
    sampling = SamplingParams(max_new_tokens=8, seed=1, ignore_eos=True)
    out = await client.generate(prompt, sampling, request_id="a", deadline_s=30)
    assert len(out.output_ids) == 8 and out.versions.tolist() == [0] * 8
    tokens = torch.from_numpy(np.concatenate([prompt, out.output_ids]))[None].long()
    with torch.no_grad():
        logp = trained(input_ids=tokens).logits[0, 2:-1].float().log_softmax(-1)
    expected = logp.gather(1, tokens[0, 3:, None])[:, 0].numpy()
    np.testing.assert_allclose(out.logprobs, expected, atol=1e-5 if dtype == "float32" else 0.05)
    engine.close(30)


def test_a_folder_without_a_model_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nothing"):
        load_engine(tmp_path / "nothing", EngineConfig(), max_context=8, threads=1)
    folder = ensure_model(ModelConfig(), tmp_path / "model", 1)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError):
        load_engine(folder, EngineConfig(), max_context=8, threads=1)
