"""Models of transformers that peft adapts."""

import importlib

from library_models import transformers_models


def lora():
    """A frozen base in bf16, with adapters in fp32."""
    peft = importlib.import_module("peft")
    model, args, kwargs = transformers_models.llama_in_bf16()
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora" in name:
            parameter.data = parameter.data.float()
    return model, args, kwargs


def ia3():
    """Vectors that scale keys, values and the input of a layer."""
    peft = importlib.import_module("peft")
    model, args, kwargs = transformers_models.MODELS["bert"]()
    layers = ["key", "value", "intermediate.dense"]
    config = peft.IA3Config(target_modules=layers, feedforward_modules=layers[2:])
    return peft.get_peft_model(model, config), args, kwargs


def prompt_tuning():
    """Four embeddings in front of the tokens, which alone are trained."""
    peft = importlib.import_module("peft")
    model, args, kwargs = transformers_models.MODELS["gpt2"]()
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return peft.get_peft_model(model, config), args, kwargs


MODELS = {"llama, lora": lora, "bert, ia3": ia3, "gpt2, prompt tuning": prompt_tuning}
