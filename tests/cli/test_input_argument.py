"""--input and --batch: what the command line makes of them."""

import re

import pytest
import torch

from amp_lab.cli.input_argument import (
    InputSpec,
    draw_inputs,
    parse_input,
    parse_shape,
    split_arguments,
)
from amp_lab.core.errors import OptionError


def test_shapes():
    assert parse_shape("8,3,224,224") == (8, 3, 224, 224)
    assert parse_shape(" 8, 3") == (8, 3)
    assert parse_shape("5") == (5,)


@pytest.mark.parametrize("text", ["", "8,", "8x3", "1.5", "8,0", "-1,3", "8;3"])
def test_what_is_no_shape_is_told_in_one_line(text):
    with pytest.raises(OptionError) as error:
        parse_shape(text)
    assert repr(text) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("8,3,224,224", InputSpec(None, "float32", (8, 3, 224, 224))),
        ("int64:2,128<32000", InputSpec(None, "int64", (2, 128), 32000)),
        ("labels=int64:2,128<32000", InputSpec("labels", "int64", (2, 128), 32000)),
        ("mask=bool:2,128", InputSpec("mask", "bool", (2, 128))),
        ("x=2,4", InputSpec("x", "float32", (2, 4))),
        (" bfloat16 : 2, 4 ", InputSpec(None, "bfloat16", (2, 4))),
        ("uint8:2<256", InputSpec(None, "uint8", (2,), 256)),
    ],
)
def test_an_input_has_a_name_a_dtype_a_shape_and_a_range(text, spec):
    assert parse_input(text) == spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int65:2,3", r"did you mean int64\?"),
        ("banana:2,3", "give one of float32"),
        ("a-b=2,3", "'a-b' is not a valid name"),
        ("2,3<7", "<7 needs a dtype of integers: give int64:2,3<7"),
        ("labels=2,3<7", "integers: give labels=int64:2,3<7$"),
        ("float32:2,3<7", "integers: give int64:2,3<7$"),
        (f"int64:2<{2**63}", r"1 to 2\^63 - 1$"),
        ("bool:2,3<2", "needs a dtype of integers"),
        ("int64:2<0", "a whole number from 1 to"),
        ("int64:2<x", "a whole number from 1 to"),
        ("uint8:2<257", r"1 to 2\^8"),
        (f"int64:2<{'9' * 5000}", r"1 to 2\^63"),
        (",".join(["2"] * 5000), "5,000 sizes: .* 64"),
        ("9" * 5000, "is not a shape"),
        ("9999999999,9999999999", "fits into no memory"),
    ],
)
def test_a_wrong_input_is_told_in_one_short_line(text, said):
    with pytest.raises(OptionError) as error:
        parse_input(text)
    assert re.search(said, str(error.value))
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 250


def test_values_are_of_the_range_and_the_same_every_time():
    texts = ("3,4", "int64:200<5", "mask=bool:200", "zero=int32:50")
    args, kwargs = draw_inputs(map(parse_input, texts), with_values=True)
    assert [tuple(t.shape) for t in args] == [(3, 4), (200,)]
    assert args[1].unique().tolist() == [0, 1, 2, 3, 4]
    assert kwargs["mask"].unique().tolist() == [False, True]
    assert kwargs["zero"].unique().tolist() == [0]  # which every embedding has
    assert kwargs["zero"].dtype is torch.int32
    again, _ = draw_inputs(map(parse_input, texts), with_values=True)
    assert torch.equal(args[0], again[0])


def test_without_values_an_input_takes_no_memory():
    (huge,), _ = draw_inputs([parse_input("1000000,1000000")], with_values=False)
    assert huge.is_meta


def test_an_argument_is_given_once():
    with pytest.raises(OptionError, match="--input x= is given twice"):
        draw_inputs([parse_input("x=2"), parse_input("x=3")], with_values=False)


def test_a_batch_may_be_a_tensor_a_tuple_a_dict_or_both():
    a, b = torch.zeros(2), torch.ones(2)
    assert split_arguments(a, "it") == ((a,), {})
    assert split_arguments((a, b), "it") == ((a, b), {})
    assert split_arguments({"x": a}, "it") == ((), {"x": a})
    assert split_arguments(((a,), {"y": b}), "it") == ((a,), {"y": b})
    assert split_arguments(({"x": a},), "it") == (({"x": a},), {})  # a model that takes a dict
    with pytest.raises(OptionError, match=r"it returns a int as .*inputs"):
        split_arguments(3, "it")
    with pytest.raises(OptionError, match="keys of the inputs are not strings"):
        split_arguments({1: a}, "it")
