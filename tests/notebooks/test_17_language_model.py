"""What notebook 17 says of LoRA, held against peft."""

from pathlib import Path

import pytest
import torch
from definitions import definitions
from torch import nn

SOURCE = Path(__file__).parents[2] / "notebooks" / "17_language_model.py"
PLACE = "base_model.model.0.lora_{}.default.weight"


@pytest.mark.slow
def test_lora_is_that_of_peft():
    peft = pytest.importorskip("peft")
    lora = definitions(SOURCE, device=torch.device("cpu"))["LoRA"]
    torch.manual_seed(0)
    base = nn.Linear(24, 16)
    ours = lora(base, rank=4, alpha=8)
    with torch.no_grad():
        ours.up.normal_()
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0"])
    theirs = peft.get_peft_model(nn.Sequential(base), settings)
    state = {PLACE.format("A"): ours.down, PLACE.format("B"): ours.up}
    assert not theirs.load_state_dict(state, strict=False).unexpected_keys
    x = torch.randn(32, 24)
    torch.testing.assert_close(theirs(x), ours(x), rtol=1e-6, atol=1e-5)
    weight = base.weight.clone()
    merged = theirs.merge_and_unload()[0].weight
    torch.testing.assert_close(merged, weight + ours.update(), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_peft_keeps_adapters_in_fp32_unless_told_otherwise(kept, dtype):
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.Linear(8, 8)).bfloat16()
    settings = peft.LoraConfig(r=4, target_modules=["0"])
    model = peft.get_peft_model(base, settings, autocast_adapter_dtype=kept)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {dtype}
