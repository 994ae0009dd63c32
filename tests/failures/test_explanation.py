"""`explain`: a message is recognised in whatever it comes in, and what is unknown is called so."""

import ast
import dataclasses
import json
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from failure_messages import printed

from amp_lab import explain
from amp_lab.failures import Failure, load_reference, read_explanation
from amp_lab.failures.explanation import has_subject, last_own_line, question_of
from amp_lab.failures.patterns import flat, pattern
from amp_lab.failures.ranking import facts_together, is_described
from amp_lab.failures.words import stems_of, terms_of, words_to_search

SEEN = json.loads(Path(__file__).with_name("seen.json").read_text(encoding="utf-8"))
DESCRIBED = json.loads(Path(__file__).with_name("described.json").read_text(encoding="utf-8"))
OTHER = json.loads(Path(__file__).with_name("other_subjects.json").read_text(encoding="utf-8"))
MESSAGE = "mat1 and mat2 must have the same dtype, but got Half and Float"
CODE = "AMP0018"
NAMES = ("bf16 ", "fp16 ", "accelerate ", "cuBLAS ", "xFormers ")  # which begin in lower case
CASES = {"AMP0018": "Half and Float", "AMP0019": "Float and Half"}  # of one pattern
REFERENCE = load_reference()
SYNONYMS = REFERENCE.synonyms


def codes_of(text, reference):
    """The codes of the failures that are found for a text in a reference."""
    return [failure.code for failure in read_explanation(text, reference).failures]


@pytest.mark.parametrize(
    "text",
    [
        MESSAGE,
        f"RuntimeError: {MESSAGE}",
        f"[rank3]: RuntimeError: {MESSAGE}",
        f"torch.some.SpecialError: {MESSAGE}\n\nset TORCH_LOGS",
        MESSAGE.replace("Half", "BFloat16"),
        MESSAGE.replace("Half", "torch.float16").replace("Float", "torch.float32"),
        MESSAGE.replace("but got", "\nbut got"),
        f"\x1b[31mRuntimeError\x1b[0m: {MESSAGE}",
        "│ RuntimeError: " + MESSAGE.replace("same", "same │\n│") + " │",
        MESSAGE.upper(),
    ],
)
def test_a_message_is_recognised_though_it_is_printed_otherwise(text):
    assert explain(text)[0].code == CODE


@pytest.mark.parametrize(
    "text",
    [
        "AMP0004",
        "amp0004",
        "\x1b[31mAMP0004\x1b[0m",
        "what is AMP0004?",
        "use torch.finfo(x.dtype).min (or .max) instead of the number (AMP0004).",
        f"... AMP0004\nRuntimeError: {MESSAGE}",
    ],
)
def test_a_code_in_the_text_is_found_first(text):
    explanation = read_explanation(text)
    assert explanation.failures[0].code == "AMP0004"
    assert explanation.by_message


def test_codes_come_in_the_order_of_the_text_and_before_messages():
    found = explain(f"(AMP0020); (AMP0004); (amp0020)\nRuntimeError: {MESSAGE}")
    assert [failure.code for failure in found] == ["AMP0020", "AMP0004", CODE]
    again = explain(f"RuntimeError: {MESSAGE}\n{CODE}")
    assert [failure.code for failure in again].count(CODE) == 1


@pytest.mark.parametrize("text", ["AMP9999", "AMP00040", "XAMP0004", "AMP004"])
def test_a_code_that_there_is_not_is_unknown(text):
    assert explain(text) == []
    assert explain(f"{text} RuntimeError: {MESSAGE}")[0].code == CODE


def test_numbers_and_names_may_differ():
    one = pattern("X", "Expected self.size(1) to be divisible by 16, but got self.size(1)=17")
    text = "Expected self.size(1) to be divisible by 8, but got self.size(1)=3"
    assert re.search(one.regex, text)
    other = pattern("X", "\"{name}\" not implemented for '{dtype}'")
    assert re.search(other.regex, "\"lu_cpu\" not implemented for 'BFloat16'", re.IGNORECASE)
    assert not re.search(other.regex, "'x' not implemented for strings", re.IGNORECASE)


def test_a_tensor_on_another_device_is_no_matter_of_precision():
    message = "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor)"
    one = pattern("X", message)
    assert re.search(one.regex, message.replace("torch.cuda.HalfTensor", "CUDABFloat16Type"))
    assert not re.search(one.regex, message.replace("torch.cuda.HalfTensor", "torch.FloatTensor"))
    other = pattern("X", message.replace("cuda.", ""))
    assert re.search(
        other.regex,
        message.replace("torch.cuda.HalfTensor", "CPUBFloat16Type").replace("cuda.", ""),
    )
    assert not re.search(other.regex, message)


def test_windows_writes_struct_before_a_dtype():
    text = "Input type (float) and bias type (c10::Half) should be the same"
    one = pattern("X", text)
    assert re.search(one.regex, text.replace("c10::Half", "struct c10::BFloat16"), re.IGNORECASE)


def test_of_messages_that_differ_in_their_dtypes_the_one_with_those_of_the_text_counts():
    both = tuple(pattern(code, f"got {dtypes}") for code, dtypes in CASES.items())
    reference = dataclasses.replace(REFERENCE, patterns=both)
    for code, dtypes in CASES.items():
        found = read_explanation(f"RuntimeError: got {dtypes}", reference).failures
        assert [failure.code for failure in found] == [code]
    found = read_explanation("RuntimeError: got BFloat16 and Half", reference).failures
    assert {failure.code for failure in found} == set(CASES)


def test_a_pattern_is_as_specific_as_its_characters():
    assert pattern("X", "abc {any}").literal == 3
    assert pattern("X", "abc 12 torch.float16").literal == 3
    assert pattern("X", "abc {any} defgh").fragment == " defgh"


def test_a_message_may_lack_its_article_and_comma():
    for dtypes, code in (("Half and Float", "AMP0018"), ("Double and Float", "AMP0151")):
        text = f"mat1 and mat2 must have the same dtype, but got {dtypes}"
        for typed in (text, text.replace("the ", ""), text.replace(",", "")):
            assert explain(typed)[0].code == code


def test_a_message_at_the_start_of_the_last_error_comes_before_what_was_printed_after_it():
    error = "FloatingPointError: Minimum loss scale reached (0.0001)."
    note = "INFO | fairseq.trainer | NOTE: overflow detected, setting loss scale to: 0.00048828125"
    assert explain(f"{error}\n{note}")[0].code == "AMP0070"
    assert explain(note)[0].code == "AMP0071"


def test_the_last_error_of_a_log_counts_most():
    log = (
        "train.py:3: FutureWarning: `torch.cuda.amp.GradScaler(args...)` is deprecated. "
        "Please use `torch.amp.GradScaler('cuda', args...)` instead.\n"
        "  0%|          | 0/100\n"
        f"RuntimeError: {MESSAGE}\n"
    )
    found = explain(log)
    assert found[0].code == CODE
    assert "AMP0035" in [failure.code for failure in found]


@pytest.mark.parametrize(
    ("before", "code"),
    [
        ("loss = criterion(output, target)", "AMP0018"),
        ("LoRA trains, but generate() raises", "AMP0154"),
        ("out = F.scaled_dot_product_attention(q, k, v)", "AMP0097"),
        ("bnb_4bit_quant_type='nf4'", "AMP0156"),
        ("ext.pointnet2_cuda.group_points_wrapper(b, c, n)", "AMP0078"),
        ("return my_op_cuda.forward(x, y)", "AMP0078"),
    ],
)
def test_the_rest_of_a_text_says_which_failure_a_message_with_many_causes_is(before, code):
    assert (
        explain(f"{before}\nRuntimeError: expected scalar type Half but found Float")[0].code
        == code
    )


def test_the_longest_clue_comes_first_and_the_failure_of_the_message_last():
    text = "resume_from_checkpoint, then evaluate: CUDA out of memory"
    codes = [failure.code for failure in explain(text)]
    assert codes == ["AMP0141", "AMP0170", "AMP0045"]


def test_a_message_with_one_cause_is_not_moved_by_a_clue():
    text = (
        "x = grid_sample(a, b.half())\nUnexpected floating ScalarType in at::autocast::prioritize"
    )
    assert explain(text)[0].code == "AMP0021"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (
            "ValueError: `.to` is not supported for `4-bit` or `8-bit` bitsandbytes models",
            "AMP0318",
        ),
        (
            "ComplexHalf support is experimental and many operators don't support it yet",
            "AMP0319",
        ),
        ("bf16 mixed precision requires PyTorch >= 1.10 and a supported device", "AMP0067"),
        (
            "RuntimeError: self and mat2 must have the same dtype, quantization_bit 4 gptq",
            "AMP0156",
        ),
    ],
)
def test_a_message_is_known_without_its_end(text, code):
    assert explain(text)[0].code == code


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("the loss does not fall in fp16", "AMP0003"),
        ("one loss of my GAN lowers the loss scale of the other", "AMP0129"),
    ],
)
def test_one_loss_that_does_not_fall_is_not_one_of_two(text, code):
    assert explain(text)[0].code == code


@pytest.mark.parametrize("failure", REFERENCE.failures.values(), ids=lambda failure: failure.code)
def test_the_statements_in_the_text_of_a_failure_are_python(failure):
    text = f"{failure.cause} {failure.cure} {failure.unsafe or ''}"
    for code in re.findall(r"`((?:for|with|while|import|from|assert|del) [^`]+)`", text):
        statement = code.replace("…", "...")
        ast.parse(f"{statement} pass" if statement.endswith(":") else statement)


def test_every_clue_leads_to_a_failure_of_the_reference():
    for message_of, causes in REFERENCE.clues.items():
        assert message_of in REFERENCE.failures
        for code, clues in causes.items():
            assert code in REFERENCE.failures
            assert all(clue == clue.lower() for clue in clues), code


def test_a_long_log_is_read_from_its_end():
    noise = "step 1 loss 0.5\n" * 200_000
    assert explain(f"{noise}RuntimeError: {MESSAGE}")[0].code == CODE
    assert explain(f"RuntimeError: {MESSAGE}\n{noise}") == []


TRACEBACK = (
    """Traceback (most recent call last):
  File "/home/me/train.py", line 42, in step
    loss = criterion(model(x), y)
  File "/usr/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1775, in _call_impl
    return forward_call(*args, **kwargs)
RuntimeError: """
    + MESSAGE
)


def test_the_users_own_line_is_named():
    line = read_explanation(TRACEBACK).own_line
    assert (line.file, line.line, line.function) == ("/home/me/train.py", 42, "step")
    assert line.code == "loss = criterion(model(x), y)"


def test_two_dtypes_in_the_backward_of_an_autograd_function_have_their_own_cause():
    """As in a checkpoint function written by hand, whose layers stand between both lines."""

    class Checkpoint(torch.autograd.Function):
        @staticmethod
        def forward(ctx, run, x):
            ctx.run = run
            ctx.save_for_backward(x)
            return run(x)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return None, torch.autograd.grad(ctx.run(x), x, grad)[0]

    layer = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = torch.ones(1, 2, requires_grad=True) @ torch.eye(2)
        output = Checkpoint.apply(layer, h)
    with pytest.raises(RuntimeError) as error:
        output.float().sum().backward()
    log = "".join(traceback.format_exception(error.value))
    assert [found.code for found in explain(log)][:2] == ["AMP0020", "AMP0018"]
    assert explain(str(error.value))[0].code == "AMP0018"


@pytest.mark.parametrize(
    ("text", "file", "number"),
    [
        ("Cell In[7], line 3\n      1 x\n----> 3 y", "Cell In[7]", 3),
        ("File ~/work/run.py:12, in main()", "~/work/run.py", 12),
        ("│ /home/me/run.py:8 in <module> │", "/home/me/run.py", 8),
    ],
)
def test_frames_of_ipython_and_rich_are_read(text, file, number):
    line = last_own_line(text)
    assert (line.file, line.line) == (file, number)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   \n",
        "hello world",
        "ModuleNotFoundError: No module named 'pandas'",
        "IndexError: list index out of range",
        "FileNotFoundError: [Errno 2] No such file or directory: 'data.csv'",
        "KeyError: 'labels'",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "AttributeError: 'Linear' object has no attribute 'shape'",
        "\0\1\2",
        "[E ProcessGroupNCCL.cpp:523] Watchdog caught collective operation timeout before the end",
    ],
)
def test_what_is_not_about_precision_is_unknown(text):
    assert explain(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "My network has 10 % accuracy after 20 epochs, I think I forgot zero_grad",
        "Early stopping does not trigger although the validation loss gets worse",
        "Reading ten million images from a network drive is slow and the GPUs are idle",
        "GAN training: the discriminator wins after a few hundred iterations",
        "my GPU runs on 30-40% and only one CPU thread runs on 95%",
        "When I resume training, memory of the CPU grows because of the dataloader workers",
    ],
)
def test_a_description_of_other_trouble_is_unknown(text):
    assert explain(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "Precision and F-score are ill-defined and being set to 0.0 in labels",
        "The mean average precision of my detector is 0.0 after 10 epochs",
        "double free or corruption (out)",
        "half of the images are never shown",
    ],
)
def test_words_that_have_another_meaning_in_a_phrase_are_unknown(text):
    assert explain(text) == []


@pytest.mark.parametrize("case", OTHER, ids=lambda case: case["source"])
def test_a_message_about_another_subject_is_unknown_whatever_flags_stand_beside_it(case):
    assert explain(case["text"]) == []


def test_a_checkpoint_that_recomputes_another_shape_is_no_matter_of_precision():
    def message(saved: str, recomputed: str) -> str:
        tensors = [f"{{'shape': {shape}}}" for shape in (saved, recomputed)]
        return (
            "CheckpointError: torch.utils.checkpoint: Recomputed values for the following tensors "
            "have different metadata than during the forward pass.\ntensor at position 1:\n"
            f"saved metadata: {tensors[0]}\nrecomputed metadata: {tensors[1]}\n"
        )

    bf16 = "torch.Size([2]), 'dtype': torch.bfloat16"
    assert explain(message(bf16, bf16.replace("2", "3"))) == []
    assert explain(message(bf16, bf16.replace("bfloat16", "float32")))[0].code == "AMP0080"


def test_a_log_is_known_by_its_words_only_if_it_has_an_alarm():
    log = "INFO 12:01:02 engine: dtype=torch.float16\nINFO 12:01:03 step 7, loss {}"
    assert explain(log.format("0.4")) == []
    assert explain(log.format("nan"))


def test_a_warning_before_an_error_about_another_subject_does_not_count():
    warning = "FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated."
    other = "RuntimeError: The size of tensor a (64) must match the size of tensor b (256)"
    assert explain(warning)[0].code == "AMP0035"
    assert explain(f"{warning}\n{other}") == []
    assert explain(f"{warning}\nRuntimeError: {MESSAGE}\n{other}")[0].code == CODE


def test_the_options_of_a_command_are_no_description():
    command = "train.py --bf16 True --save_strategy no --max_steps 50 --gradient_checkpointing"
    assert explain(f"the training hangs forever: {command}") == []
    assert explain("the training with --bf16 True is slow on a V100")


def test_a_long_text_with_few_words_of_one_failure_is_unknown():
    text = (
        "Total VRAM 20470 MB, total RAM 28652 MB. Forcing FP16. Set vram state to NORMAL_VRAM. "
        "Using pytorch cross attention. Loading Impact Pack. Wildcards loading done. Fetch data "
        "from the registry. Import times for custom nodes. Starting server, to see the GUI open it"
    )
    assert explain(text) == []
    assert explain("Forcing FP16 gives a black image on a GTX 1660")


def test_several_words_may_be_one_term():
    terms = terms_of("Out of memory in a half-precision run, torch.compile is on", SYNONYMS)
    assert terms == ["oom", "in", "a", "fp16", "run", "compile", "is", "on"]
    assert terms_of("a data type", SYNONYMS) == ["a", "dtype"]
    assert terms_of("data", SYNONYMS) == ["data"]


def test_of_a_contraction_only_the_first_word_counts():
    assert terms_of("doesn't the model’s loss", SYNONYMS) == ["does", "the", "model", "loss"]


def test_a_rare_word_counts_less_than_in_bm25():
    text = "fp16 predicts slower than fp32, is this normal for a GTX 1080 without Tensor Cores?"
    assert explain(text)[0].code == "AMP0176"


def test_a_term_is_searched_once_and_without_stop_words():
    words = words_to_search("the loss is NaN, and the loss stays a NaN", SYNONYMS)
    assert words == ["loss", "nan", "stai"]


def test_an_extension_that_asks_for_a_pointer_of_another_dtype_prints_where():
    """A header of an installed torch: torch's own kernels were built elsewhere."""
    message = "RuntimeError: expected scalar type Float but found Half (data_ptr<float> at {}:574)"
    installed = "/opt/venv/lib/python3.8/site-packages/torch/include/ATen/core/TensorMethods.h"
    assert explain(message.format(installed))[0].code == "AMP0078"
    built = "/pytorch/build/aten/src/ATen/core/TensorMethods.h"
    assert explain(message.format(built))[0].code == "AMP0018"


def test_a_printed_error_that_shares_only_some_words_with_a_failure_is_unknown():
    text = "ValueError: the gradient dtype and the checkpoint format {} need another launcher"
    assert has_subject(text, REFERENCE)
    assert explain(text.format("v3")) == []
    shared = "RuntimeError: unscale_() has already been called on this optimizer"
    assert explain(shared)[0].code == "AMP0010"


def test_a_description_that_names_only_the_mode_of_the_model_is_unknown():
    text = "In training mode the accuracy is fine, in eval mode it drops to random guess"
    assert explain(text) == []
    assert explain(f"{text} with bf16") != []


def test_a_description_is_known_if_it_has_the_facts_of_a_failure():
    text = "The same text, alone and in a larger batch with others, gives slightly different logits"
    assert explain(text)[0].code == "AMP0098"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("fp16 inference is five times slower than fp32 on my GTX 1650", "AMP0176"),
        ("fp16 makes my large transformer no faster than fp32 on an RTX 4090", "AMP0033"),
        ("the outputs are NaN in half precision, only on a GTX 1660 Ti", "AMP0077"),
        ("the loss is NaN after optimizer.step if the weights of the model are fp16", "AMP0121"),
        ("I trained with --fp16, but the model that is saved is fp32", "AMP0146"),
    ],
)
def test_a_fact_decides_between_failures_that_share_their_words(text, code):
    assert explain(text)[0].code == code


def test_a_failure_without_what_the_description_names_counts_less():
    text = "the loss is NaN in fp16"
    named = {"trainer": {"words": ["trainer"], "codes": ["AMP0114"]}}
    reference = dataclasses.replace(REFERENCE, named=named, described={})
    before = codes_of(text, reference)
    after = codes_of(f"{text} with the Trainer", reference)
    assert before[0] != "AMP0114"
    assert after[0] == "AMP0114"


def test_facts_point_to_a_failure_only_if_they_stand_together():
    facts = {"AMP0176": [[["slow"], ["cpu", "tpu"]]]}
    reference = dataclasses.replace(REFERENCE, described=facts)
    assert is_described("AMP0176", {"slow", "tpu", "bf16"}, reference)
    assert not is_described("AMP0176", {"slow", "bf16"}, reference)
    assert not is_described("AMP0033", {"slow", "tpu"}, reference)


def test_a_failure_that_facts_speak_against_counts_less():
    text = "training does not converge in fp16"
    plain = dataclasses.replace(REFERENCE, named={}, described={}, contradicted={})
    first = codes_of(text, plain)[0]
    against = dataclasses.replace(plain, contradicted={first: [[["fp16"], ["!", "bf16"]]]})
    assert codes_of(text, against)[0] != first
    assert codes_of(f"{text} or bf16", against) == codes_of(f"{text} or bf16", plain)


def test_a_fact_may_be_that_a_word_is_absent():
    facts = {"AMP0118": [[["bf16"], ["nan"], ["!", "fp16", "rocm"]]]}
    reference = dataclasses.replace(REFERENCE, described=facts)
    assert is_described("AMP0118", {"bf16", "nan"}, reference)
    assert not is_described("AMP0118", {"bf16", "nan", "rocm"}, reference)
    assert facts_together("AMP0118", {"bf16", "nan"}, reference) == 2


def test_exclamation_marks_are_a_word_and_a_measured_value_is_none():
    assert terms_of("the answer is !!!!!", {}) == ["the", "answer", "is", "garbage"]
    assert terms_of("loss 0.0, mAP 0.465, torch 2.11", {}) == [
        "loss",
        "0",
        "0",
        "map",
        "torch",
        "2",
        "11",
    ]


def test_a_fact_has_any_form_of_its_word():
    facts = [["scale"], ["drop"]]
    reference = dataclasses.replace(REFERENCE, described={"AMP0001": [facts]})
    stems = stems_of(["scales", "dropped"])
    assert is_described("AMP0001", stems, reference)


def test_a_description_with_the_facts_of_a_failure_needs_no_word_of_the_subject():
    text = (
        "I ran the same matmul on a GTX 1080 and on an A40: the result of the A40 is wrong. "
        "Is this only a floating point issue?"
    )
    assert not has_subject(text, REFERENCE)
    assert explain(text)[0].code == "AMP0186"
    assert explain(text.replace("A40", "GTX 1070")) == []


def test_the_words_of_the_clues_are_words_of_the_index():
    for name, named in REFERENCE.named.items():
        assert named["codes"], name
    assert set(REFERENCE.contradicted) <= set(REFERENCE.failures)
    for code, descriptions in REFERENCE.described.items():
        assert code in REFERENCE.failures
        for facts in descriptions:
            present = [words for words in facts if words[0] != "!"]
            assert len(present) >= 2, f"{code}: one fact alone would decide"


def test_the_numbers_of_a_log_do_not_count_in_a_description():
    log = "time: 0.539, memory: 7239, loss: 1.9091, lr: 1.0e-03, grad_norm: nan"
    assert question_of(f"is it normal? {log}").split() == [
        "is",
        "it",
        "normal?",
        "grad_norm:",
        "nan",
    ]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("All pictures come out black on a GTX 1660", "AMP0077"),
        ("The loss on mps is worse than the one on the cpu", "AMP0310"),
        ("I finetune with LoRA, and the loss is 0.0 from step 15 on", "AMP0114"),
    ],
)
def test_three_facts_need_no_word_of_the_subject(text, code):
    assert not has_subject(text, REFERENCE)
    assert explain(text)[0].code == code


def test_two_facts_alone_need_a_word_of_the_subject():
    assert explain("All pictures come out black") == []
    assert explain("The loss is 0.0 from step 15 on") == []


def test_an_unknown_text_comes_with_the_nearest_pages():
    explanation = read_explanation("ValueError: could not write the checkpoint to the cluster")
    assert explanation.failures == ()
    assert 1 <= len(explanation.nearest) <= 3


def test_a_message_with_other_causes_counts_only_beside_a_word_of_the_subject():
    message = "RuntimeError: Expected to have finished reduction in the prior iteration before"
    assert explain(f"{message} starting a new one.") == []
    assert explain(f"with torch.autocast\n{message} starting a new one.")[0].code == "AMP0040"


def test_a_clue_in_an_out_of_memory_error_names_its_cause():
    assert explain("CUDA out of memory. Tried to allocate 2.00 GiB")[0].code == "AMP0045"
    assert explain("CUDA out of memory when I resume the run")[0].code == "AMP0141"


def test_a_graph_break_under_autocast_is_explained_by_torch_itself():
    text = (
        "torch._dynamo.exc.Unsupported: Graph break under `torch.autocast`\n"
        "https://meta-pytorch.github.io/compile-graph-break-site/gb/gb0025.html"
    )
    found = {failure.code: failure for failure in explain(text)}
    assert "graph_break()" in found["GB0025"].title
    assert found["GB0025"].page.endswith("gb0025.html")
    assert explain(text.replace("torch.autocast", "print")) == []  # not about precision
    assert "GB9999" not in str(explain(text.replace("gb0025", "gb9999")))


@pytest.mark.parametrize("case", SEEN, ids=[str(number) for number in range(len(SEEN))])
def test_a_message_from_a_public_thread_is_known(case):
    assert explain(case["text"])


def test_most_descriptions_from_public_threads_find_their_failure_first():
    found = [explain(case["text"])[:1] for case in DESCRIBED]
    right = [
        case
        for case, first in zip(DESCRIBED, found, strict=True)
        if first[0].code in case["expected"]
    ]
    assert len(right) >= 79, len(right)  # 82 of 86 when this number was set


@pytest.mark.parametrize("code", sorted(REFERENCE.failures))
def test_each_message_finds_its_own_failure(code):
    for message in REFERENCE.failures[code].messages:
        assert explain(printed(message))[0].code == code, message


@pytest.mark.parametrize("code", sorted(REFERENCE.failures))
def test_a_failure_says_why_and_what_to_do_in_a_few_sentences(code):
    failure: Failure = REFERENCE.failures[code]
    for text in (failure.cause, failure.cure):
        assert text[0].isupper() or text[0] in "`0123456789" or text.startswith(NAMES), text
        assert text.endswith((".", "!", "`", ")", ":")), text
        assert 20 <= len(text) <= 700, text
    assert failure.messages or failure.symptoms


@pytest.mark.parametrize(
    "unit", ["\n", " ", "a", "1", "[", "Error", 'File "', "torch.float16 ", "AMP"]
)
def test_a_megabyte_of_anything_takes_no_time_that_grows_with_its_square(unit):
    explain(unit * (2**20 // len(unit)))  # pytest itself would stand still


def test_words_are_refused_without_lunr_in_one_line():
    program = (
        "import sys; sys.modules['lunr'] = None; from amp_lab.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "explain", "the loss is nan"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "amp-lab explain: finding a text by its words needs lunr: pip install lunr\n"
    )


def test_an_exception_is_refused_with_what_to_pass():
    with pytest.raises(TypeError, match=r"not ValueError: pass str\(error\)"):
        explain(ValueError(MESSAGE))


def test_a_message_is_found_without_lunr():
    program = (
        "import sys; sys.modules['lunr'] = None; from amp_lab import explain;"
        f"print(explain({MESSAGE!r})[0].code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == f"{CODE}\n", done.stderr


def test_flat_takes_the_marks_of_ranks_and_frames_away():
    assert flat("[rank0]: a\n[rank1]:   b │ c") == "a b c"
