"""docs/quantized.md: its programs run, and the libraries do what it says of them.

CI has no bitsandbytes. What the page says of it has links to its source, and the tests here passed
with bitsandbytes 0.50.2.
"""

import copy
import io
import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cpu_kernels import needs_int8_matmul
from torch import nn
from torch.nn import functional as F

from amp_lab.formats import hopper_matmul

PAGE = (Path(__file__).parents[2] / "docs" / "quantized.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
SECTIONS = {section.partition("\n")[0]: section for section in PAGE.split("\n## ")[1:]}
E4M3 = torch.float8_e4m3fn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread_and_seed"),
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]


def program(question):
    """The last block of code of an answer."""
    return FENCE.findall(SECTIONS[question])[-1]


def off(found, exact):
    return float((found.float() - exact.float()).norm() / exact.float().norm())


def to_e4m3(values):
    """E4M3 numbers with one scale, and the scale to multiply them by."""
    scale = values.abs().amax() / 448
    return (values / scale).to(E4M3), scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.last = nn.Linear(64, 2)

    def forward(self, x):
        return self.last(self.first(x))


# --- checkpoints of transformers ---


@pytest.fixture
def llama(tmp_path):
    """A tiny language model in bf16 and its checkpoint."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=192,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    return model, tmp_path


@pytest.fixture
def fp8_checkpoint(llama):
    """The checkpoint rewritten in DeepSeek's format: E4M3 with a scale for 128 x 128 weights."""
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    model, folder = llama
    file = folder / "model.safetensors"
    stored = {}
    for name, values in safetensors.load_file(file).items():
        stored[name] = values
        if "proj" in name:
            rows, columns = values.shape
            padded = F.pad(values.float(), (0, -columns % 128, 0, -rows % 128))
            scale = padded.unfold(0, 128, 128).unfold(1, 128, 128).abs().amax((-1, -2)) / 448
            whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            stored[name] = (values.float() / whole[:rows, :columns]).to(E4M3)
            stored[f"{name}_scale_inv"] = scale
    safetensors.save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    return model, stored, folder


def load(question, folder):
    """Run the program of an answer that loads a checkpoint."""
    import transformers

    names = {"torch": torch, "path": str(folder)} | vars(transformers)
    names["AutoModelForCausalLM"] = transformers.AutoModelForCausalLM
    for name in ("FineGrainedFP8Config", "BitsAndBytesConfig"):
        names[name] = getattr(transformers, name)
    exec(program(question), names)
    return names["model"]


def test_an_fp8_checkpoint_needs_its_scales(fp8_checkpoint):
    """AMP0282."""
    model, stored, _ = fp8_checkpoint
    names = {"torch": torch}
    exec(program("How do I convert an FP8 checkpoint to bf16?"), names)
    for name, exact in model.state_dict().items():
        if "proj" in name:
            assert off(stored[name].to(torch.bfloat16), exact) > 10
            found = names["dequantize"](stored[name], stored[f"{name}_scale_inv"])
            assert found.dtype is torch.bfloat16
            assert off(found, exact) < 0.05


def test_transformers_dequantizes_an_fp8_checkpoint(fp8_checkpoint):
    """AMP0282."""
    model, _, folder = fp8_checkpoint
    loaded = load("Can I fine-tune a 4-bit, 8-bit or FP8 checkpoint directly?", folder)
    assert {value.dtype for value in loaded.parameters()} == {torch.bfloat16}
    for name, exact in model.state_dict().items():
        assert off(loaded.state_dict()[name], exact) < 0.05
    loaded(torch.arange(8)[None]).logits.sum().backward()
    assert loaded.model.layers[0].mlp.up_proj.weight.grad is not None


@pytest.mark.skipif(torch.accelerator.is_available(), reason="it keeps FP8 on a GPU")
def test_without_a_gpu_transformers_dequantizes_unasked(fp8_checkpoint):
    import transformers

    model, _, folder = fp8_checkpoint
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    layer, exact = (m.model.layers[0].mlp.up_proj.weight for m in (loaded, model))
    assert layer.dtype is torch.bfloat16
    assert off(layer, exact) < 0.05


def test_the_default_compute_dtype_is_fp32():
    """AMP0156."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    assert transformers.BitsAndBytesConfig().bnb_4bit_compute_dtype is torch.float32


# --- bitsandbytes, which CI does not have ---


def compute_dtypes(model, monkeypatch):
    """The dtypes in which the 4-bit layers of a model multiply."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    seen, matmul = set(), bitsandbytes.matmul_4bit

    def watched(x, *args, **kwargs):
        seen.add(x.dtype)
        return matmul(x, *args, **kwargs)

    monkeypatch.setattr(bitsandbytes, "matmul_4bit", watched)
    model(torch.arange(8)[None])
    return seen


def test_4_bit_layers_compute_in_the_compute_dtype(llama, monkeypatch):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    import transformers

    _, folder = llama
    model = load("Which bnb_4bit_compute_dtype should I set?", folder)
    assert compute_dtypes(model, monkeypatch) == {torch.bfloat16}
    config = transformers.BitsAndBytesConfig(load_in_4bit=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16
    )
    assert compute_dtypes(model, monkeypatch) == {torch.float32}


@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_8_bit_layers_multiply_outliers_in_the_dtype_of_the_input(threshold):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    assert transformers.BitsAndBytesConfig().llm_int8_threshold == 6.0
    model = nn.Linear(64, 32, bias=False)
    layer = bitsandbytes.nn.Linear8bitLt(
        64, 32, bias=False, has_fp16_weights=False, threshold=threshold
    )
    layer.load_state_dict(model.state_dict())
    layer = layer.to("cpu").eval()
    x = torch.randn(4, 64).to(torch.bfloat16)
    x[1, 3] = 1e5  # too large for fp16
    output = layer(x)
    assert output.dtype is torch.bfloat16
    if threshold:
        assert off(output, model(x.float())) < 0.02
    else:
        assert output[1].isnan().all()


def test_merging_into_4_bits_loses_most_of_a_small_update(llama):
    """AMP0200. AMP0312: a 4-bit weight is dequantized before it is used as a matrix."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def values(layer):
        return bitsandbytes.functional.dequantize_4bit(layer.weight, layer.weight.quant_state)

    _, folder = llama
    base = load("Which bnb_4bit_compute_dtype should I set?", folder)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["up_proj"]))
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    nn.init.normal_(layer.lora_B["default"].weight, std=0.002)
    before, update = values(layer.base_layer).float(), layer.get_delta_weight("default")
    merged = values(model.merge_and_unload().model.layers[0].mlp.up_proj).float()
    assert off(before + update, before) < 0.2
    assert off(merged - before, update) > 0.5


def test_8_bit_adam_of_bitsandbytes():
    """AMP0281."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64))
    optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())
    step(model, optimizer)
    dtypes = [optimizer.state[p]["state1"].dtype for p in model.parameters()]
    assert dtypes == [torch.uint8, torch.uint8, torch.float32]
    ordinary = torch.optim.AdamW(model.parameters())
    step(model, ordinary)
    in_8_bits = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(ordinary.state_dict())
    with pytest.raises(KeyError, match="state1"):
        step(model, optimizer)
    ordinary.load_state_dict(in_8_bits)
    with pytest.raises(KeyError, match="exp_avg"):
        step(model, ordinary)


def test_embeddings_can_keep_a_state_in_32_bits():
    """AMP0128."""
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    module = nn.Embedding(64, 64)
    model = nn.Sequential(module, nn.Linear(64, 64))
    optimizer = bnb.optim.AdamW8bit(model.parameters())
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.register_module_override(module, "weight", {"optim_bits": 32})
    step(model, optimizer)
    assert optimizer.state[module.weight]["state1"].dtype is torch.float32
    assert optimizer.state[model[1].weight]["state1"].dtype is torch.uint8


def step(model, optimizer):
    model(torch.arange(8)).sum().backward()
    optimizer.step()


# --- LoRA ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("in_fp32", [True, False])
def test_adapters_are_in_fp32_unless_asked_otherwise(dtype, in_fp32):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = Net()
    model.first.to(dtype)
    config = peft.LoraConfig(r=4, target_modules=["first"])
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=in_fp32)
    dtypes = {p.dtype for name, p in model.named_parameters() if "lora" in name}
    assert dtypes == {torch.float32 if in_fp32 else dtype}


def test_adapters_saved_in_bf16_are_loaded_in_fp32(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, target_modules=["first"])
    peft.get_peft_model(Net(), config).bfloat16().save_pretrained(tmp_path)
    model = peft.PeftModel.from_pretrained(Net().bfloat16(), tmp_path)
    dtypes = {p.dtype for name, p in model.named_parameters() if "lora" in name}
    assert dtypes == {torch.float32}


class Params4bit(nn.Parameter):
    """PEFT knows the 4-bit weights of bitsandbytes by the name of their class."""


@pytest.mark.filterwarnings("ignore")  # of the packages that PEFT imports
@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "aqlm", "eetq", "hqq", "torchao"])
def test_preparing_for_kbit_training_casts_what_is_not_quantized(method):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = nn.ModuleDict(
        {
            "embeddings": nn.Embedding(4, 4),
            "norm": nn.LayerNorm(4),
            "quantized": nn.Linear(4, 4, bias=False),
            "head": nn.Linear(4, 4),
        }
    ).bfloat16()
    model.quantized.weight = Params4bit(model.quantized.weight.data, requires_grad=False)
    model.quantization_method = method
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert model.quantized.weight.dtype is torch.bfloat16
    others = {p.dtype for name, p in model.named_parameters() if name != "quantized.weight"}
    assert others == {torch.float32 if method == "bitsandbytes" else torch.bfloat16}


@pytest.mark.filterwarnings("ignore")  # of the packages that PEFT imports
def test_preparing_for_kbit_training_turns_on_gradient_checkpointing():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 8, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    model.is_loaded_in_4bit = True
    assert peft.prepare_model_for_kbit_training(model).is_gradient_checkpointing


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_weights_for_inference_have_no_gradients(config):
    """AMP0283."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = Net()
    quantization.quantize_(model, getattr(quantization, config)())
    assert not model.first.weight.requires_grad


def test_adapters_of_a_torchao_base_are_in_fp32_and_train():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = Net().bfloat16()
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert not model.first.weight.requires_grad
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["first"]))
    model(torch.randn(2, 64).bfloat16()).sum().backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(trained) == 2
    assert {grad.dtype for grad in trained.values()} == {torch.float32}


@pytest.mark.filterwarnings("ignore")  # of the packages that transformers imports
def test_transformers_refuses_to_cast_a_quantized_model():
    """AMP0318."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 8, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    model.is_quantized = True
    for cast in (model.half, model.float):
        with pytest.raises(ValueError, match="is not supported for quantized model"):
            cast()
    model.quantization_method = "bitsandbytes"
    with pytest.raises(ValueError, match="cannot cast a bitsandbytes model in a new `dtype`"):
        model.to(torch.float16)
    model.quantization_method = "gptq"
    with pytest.raises(ValueError, match="cannot cast a GPTQ model in a new `dtype`"):
        model.to(torch.float16)
    model.quantization_method = "bitsandbytes"
    model.is_loaded_in_8bit = True
    with pytest.raises(ValueError, match=r"cuda\(\)` is not supported for `8-bit`"):
        model.cuda()


def test_integers_have_no_gradients():
    """AMP0283."""
    with pytest.raises(RuntimeError, match="floating point"):
        torch.zeros(2, dtype=torch.int8, requires_grad=True)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_cannot_update_fp8_weights(optimizer):
    weight = nn.Parameter(torch.ones(2).to(E4M3))
    weight.grad = torch.ones(2).to(E4M3)
    with pytest.raises(NotImplementedError, match="Float8_e4m3fn"):
        optimizer([weight]).step()


# --- torchao ---


def test_8_bit_adam_of_torchao_and_its_state():
    """AMP0281."""
    optim = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    small = nn.Linear(256, 8, bias=False)  # 2048 = 8 * 256 values
    optimizer = optim.AdamW8bit(small.parameters())
    small(torch.ones(256)).sum().backward()
    optimizer.step()
    assert type(optimizer.state[small.weight]["exp_avg"]) is torch.Tensor

    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 65)).bfloat16()  # 65 x 64 = 4160
    optimizer = optim.AdamW8bit(model.parameters())
    step(model, optimizer)
    kinds = [type(optimizer.state[p]["exp_avg"]).__name__ for p in model.parameters()]
    assert kinds == ["OptimState8bit", "Tensor", "Tensor"]
    assert optimizer.state[model[1].weight]["exp_avg"].dtype is torch.bfloat16

    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    same, ordinary = optim.AdamW8bit(model.parameters()), torch.optim.AdamW(model.parameters())
    same.load_state_dict(read(file))
    step(model, same)
    ordinary.load_state_dict(read(file))
    with pytest.raises(NotImplementedError, match="OptimState8bit"):
        step(model, ordinary)

    ordinary = torch.optim.AdamW(model.parameters())
    step(model, ordinary)
    same.load_state_dict(ordinary.state_dict())  # its learning rate is a number
    with pytest.raises(RuntimeError, match="lr was changed to a non-Tensor object"):
        step(model, same)
    for group in same.param_groups:
        group["lr"] = torch.tensor(1e-3)
    step(model, same)


@pytest.mark.parametrize("kind", ["OptimState8bit", "OptimState4bit", "OptimStateFp8"])
def test_adamw_cannot_step_with_the_state_of_torchao(kind):
    """AMP0281."""
    module = {"OptimState8bit": "subclass_8bit", "OptimState4bit": "subclass_4bit"}
    module = pytest.importorskip(f"torchao.optim.{module.get(kind, 'subclass_fp8')}")
    weight = nn.Parameter(torch.ones(64, 64))
    weight.grad = torch.ones(64, 64)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = getattr(module, kind).zeros((64, 64))
    optimizer.load_state_dict(saved)
    with pytest.raises(NotImplementedError, match=f"{kind} dispatch: attempting to run"):
        optimizer.step()


def read(file):
    file.seek(0)
    return torch.load(file)


def test_the_master_weights_of_float8_training_are_in_fp32(monkeypatch):
    """AMP0230."""
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    from torch.distributed.fsdp import fully_shard
    from torchao.float8 import fsdp_utils

    gathered = set()
    kind = fsdp_utils.WeightWithDynamicFloat8CastTensor
    pre_all_gather = kind.fsdp_pre_all_gather

    def watched(self, mesh):
        result = pre_all_gather(self, mesh)
        gathered.update(values.dtype for values in result[0])
        return result

    monkeypatch.setattr(kind, "fsdp_pre_all_gather", watched)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.ReLU())

    def emulated(**settings):  # a CPU has no FP8 kernels for the step
        return float8.Float8LinearConfig(emulate=True, **settings)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        names = {"model": model, "mesh": dist.init_device_mesh("cpu", (1,))}
        names |= {"fully_shard": fully_shard, "Float8LinearConfig": emulated}
        names["convert_to_float8_training"] = float8.convert_to_float8_training
        exec(program("Where are the master weights in float8 training with FSDP2?"), names)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(16, 32)).sum().backward()
        optimizer.step()
    finally:
        dist.destroy_process_group()
    (weight,) = model.parameters()
    assert gathered == {E4M3}
    assert weight.dtype is weight.grad.dtype is torch.float32
    assert optimizer.state[weight]["exp_avg"].dtype is torch.float32
    assert model.state_dict()["0.weight"].dtype is torch.float32


def test_float8_all_gather_takes_only_one_scale_per_tensor():
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    rowwise = float8.Float8LinearConfig.from_recipe_name("rowwise")
    settings = {"cast_config_weight": rowwise.cast_config_weight}
    with pytest.raises(AssertionError, match="only supports tensorwise"):
        float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True, **settings)


def test_an_outlier_costs_more_if_activations_are_rounded_too():
    needs_int8_matmul()
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = nn.Sequential(nn.Linear(64, 64))
    x = torch.randn(16, 64)
    with_outlier = x.clone()
    with_outlier[:, 3] *= 100
    errors = {}
    for name in ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"):
        few = copy.deepcopy(model)
        quantization.quantize_(few, getattr(quantization, name)())
        errors[name] = [off(few(values), model(values)) for values in (x, with_outlier)]
    weight_only, dynamic = errors.values()
    assert weight_only[0] < dynamic[0]
    assert weight_only[1] < 2 * weight_only[0]
    assert dynamic[1] > 2 * dynamic[0]


def test_half_does_not_change_quantized_weights():
    """AMP0312."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = nn.Sequential(nn.Linear(64, 64))
    names = {"torch": torch, "model": model} | vars(quantization)
    exec(program("Can I call `.half()` or `.to(dtype)` on a quantized model?"), names)
    model = names["model"]
    model(torch.randn(2, 64).bfloat16())
    for cast in (model.half, lambda: model.to(torch.float16)):
        cast()
        assert model[0].weight.dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match="same dtype"):
        model(torch.randn(2, 64).half())


def test_torchao_takes_the_place_of_quantize_dynamic():
    """AMP0284."""
    needs_int8_matmul()
    pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    from torch.ao.quantization import prepare

    model = nn.ModuleDict({"linear": nn.Linear(64, 64), "lstm": nn.LSTM(64, 64)})
    names = {"model": copy.deepcopy(model)}
    exec(program("torch.ao.quantization is deprecated: what do I use?"), names)
    assert off(names["model"]["linear"](torch.eye(64)), model["linear"](torch.eye(64))) < 0.05
    for name in ("weight_ih_l0", "weight_hh_l0"):
        kept, exact = (getattr(m["lstm"], name) for m in (names["model"], model))
        assert torch.equal(kept, exact)
    with pytest.warns(DeprecationWarning, match=r"ao\.quantization is deprecated .* in 2\.10"):
        prepare(nn.Sequential(nn.ReLU()))


@pytest.mark.filterwarnings("ignore")  # deprecated
def test_the_functions_of_fx_graphs_still_quantize():
    """AMP0284."""
    needs_int8_matmul()
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    model, x = nn.Sequential(nn.Linear(64, 64)).eval(), torch.eye(64)
    prepared = prepare_fx(model, get_default_qconfig_mapping(), (x,))
    prepared(x)
    assert off(convert_fx(prepared)(x), model(x)) < 0.05


# --- FP8 values ---


def test_fnuz_has_half_the_value_and_no_negative_zero():
    """AMP0286."""
    question = "Does an FP8 checkpoint work on an MI300 (fnuz)?"
    weight = torch.tensor([*range(127), *range(128, 255)], dtype=torch.uint8).view(E4M3)
    names = {"torch": torch, "weight": weight, "scale": torch.tensor(0.25)}
    exec(program(question), names)
    assert names["weight"].dtype is torch.float8_e4m3fnuz
    assert torch.equal(names["weight"].float() * names["scale"], weight.float() * 0.25)
    assert torch.tensor([-128], dtype=torch.int8).view(torch.float8_e4m3fnuz).float().isnan()
    assert torch.finfo(torch.float8_e4m3fnuz).max == 240


def test_an_fp8_cache_with_scale_1_clips_large_keys():
    """AMP0199."""

    def stored(values, scale):
        return (values / scale).clamp(-448, 448).to(E4M3).float() * scale

    usual, large = torch.rand(1000) + 0.5, torch.linspace(500, 2000, 1000)
    for values in (usual, torch.linspace(2**-6, 448, 1000)):
        assert ((stored(values, 1.0) / values - 1).abs() <= 2**-4).all()
    assert off(stored(large, 1.0), large) > 0.5
    assert ((stored(large, large.max() / 448) / large - 1).abs() <= 2**-4).all()


def test_fast_accumulation_loses_more_in_longer_sums():
    """AMP0280."""
    lost = {}
    for k in (256, 4096):
        for fast in (True, False):
            left, right = (to_e4m3(values)[0] for values in torch.rand(2, 8, k))
            exact = left.double() @ right.double().T
            lost[k, fast] = off(hopper_matmul(left, right, fast_accum=fast), exact)
    assert 0.001 < lost[256, True] < 0.004
    assert 0.06 < lost[4096, True] < 0.09
    assert lost[256, False] < 0.001 > lost[4096, False]
    left, right = (to_e4m3(values)[0] for values in torch.randn(2, 8, 4096))
    exact = left.double() @ right.double().T
    assert off(hopper_matmul(left, right, fast_accum=True), exact) < 0.003
    assert off(hopper_matmul(left, right, fast_accum=False), exact) < 0.001


# --- ONNX ---


class Norm(nn.Module):
    """A layer and a norm whose squares are larger than 65504."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x)
        return h / (h.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def exported(model, x):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    how = {"input_names": ["x"], "output_names": ["y"], "verbose": False}
    return torch.onnx.export(model, (x,), **how).model_proto


def run(file, x):
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    session = onnxruntime.InferenceSession(file.SerializeToString())
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


@pytest.fixture
def norm_and_input():
    return Norm().eval(), torch.randn(4, 8) * 1000


def test_casts_in_the_model_keep_ops_of_onnx_in_fp32(norm_and_input):
    model, x = norm_and_input
    exact = model(x)
    block = FENCE.findall(SECTIONS["How do I keep some ONNX ops in fp32 (op_block_list)?"])[0]
    names = {}
    exec(block, names)
    mixed = type("Mixed", (Norm,), {"forward": names["forward"]})()
    mixed.load_state_dict(model.state_dict())
    found = run(exported(mixed.half().eval(), x), x)
    assert found.dtype is torch.float32
    assert off(found, exact) < 0.01


def test_blocked_ops_of_onnx_overflow_between_two_of_them(norm_and_input):
    """AMP0287."""
    float16 = pytest.importorskip("onnxruntime.transformers.float16")
    model, x = norm_and_input
    exact = model(x)
    file = exported(model, x)
    names = {"model": copy.deepcopy(file)}
    exec(program("How do I keep some ONNX ops in fp32 (op_block_list)?"), names)
    assert off(run(names["converted"], x), exact) < 0.01
    blocked = names["blocked"]
    left = float16.convert_float_to_float16(file, keep_io_types=True, op_block_list=blocked)
    assert not run(left, x).any()  # every square became infinite


def test_a_converter_to_fp16_casts_a_norm_whose_squares_overflow(norm_and_input):
    """AMP0197."""
    float16 = pytest.importorskip("onnxruntime.transformers.float16")
    model, x = norm_and_input
    file = exported(model, x)
    how = {"keep_io_types": True, "op_block_list": []}
    cast = float16.convert_float_to_float16(copy.deepcopy(file), **how)
    ops = [node.op_type for node in cast.graph.node]
    assert {"Pow", "ReduceMean"} <= set(ops)
    assert ops.count("Cast") == 2  # the file's input and output
    assert not copy.deepcopy(model).half()(x.half()).any()  # every square became infinite
    blocked = float16.convert_float_to_float16(file, keep_io_types=True, op_block_list=["Pow"])
    assert [node.op_type for node in blocked.graph.node].count("Cast") > 2
    small = torch.tensor([1e-5, 1e-6, 1e-7])
    assert ((small.half() / small - 1).abs() > 2**-11).all()


def test_adapters_on_fp8_layers_of_transformers_can_be_trained():
    transformers = pytest.importorskip("transformers")
    from transformers.quantizers import quantizer_finegrained_fp8 as quantizers

    config = transformers.FineGrainedFP8Config()
    assert quantizers.FineGrainedFP8HfQuantizer(config).is_trainable
