"""The forecast for a GPU: torchao's roofline, number for number."""

import math

import pytest
import torch

from amp_lab.core.gpus import GPUS
from amp_lab.formats import FORMATS
from amp_lab.formats.roofline import forward_s, has_forecast, step_s

NAMES = {
    "h100": "NVIDIA H100",
    "b200": "NVIDIA B200",
    "b300": "NVIDIA B300 SXM6 AC",
    "gb200": "NVIDIA GB200",
    "mi300x": "AMD Instinct MI300X",
}


def forecast_on(name: str) -> list[str]:
    return [form.name for form in FORMATS.values() if has_forecast(GPUS[name], form)]


SIZES = [(1024, 2048, 1024), (4096, 8192, 16384), (64, 64, 64), (100_000, 512, 128)]


@pytest.mark.filterwarnings("ignore")  # of torchao's own
@pytest.mark.parametrize("name", NAMES)
def test_a_step_takes_as_long_as_torchaos_roofline_says(name):
    roofline = pytest.importorskip("torchao.testing.training.roofline_utils")
    specs = roofline.get_specs(NAMES[name])
    for form in {"bf16", *forecast_on(name)} - {"nvfp4"}:  # which it has not
        kinds = {"bf16": torch.bfloat16, "mxfp4": torch.float4_e2m1fn_x2}
        dtype = kinds.get(form, torch.float8_e4m3fn)
        mx = {"mxfp8": "mxfp8_cublas", "mxfp4": "mxfp4_cutlass"}.get(form)
        fp8 = {"fp8": "tensorwise", "fp8-rowwise": "rowwise"}.get(form)
        for m, k, n in SIZES:
            expected = roofline.get_gemm_time_sympy(m, k, n, dtype, fp8, mx, NAMES[name])
            roles = [(m, k, "input"), (k, n, "weight"), (m, n, "grad_output")]
            for high, wide, role in roles if form != "bf16" else ():
                of_cast = roofline.get_tensor_memory_traffic_ovhd_s
                expected += sum(of_cast(specs, high, wide, role, fp8, mx))
            found = step_s(GPUS[name], FORMATS[form], m, k, n)
            assert math.isclose(found, float(expected), rel_tol=1e-9)


RECIPES = {
    "bf16": (torch.bfloat16, None),
    "fp8": (torch.float8_e4m3fn, "tensorwise"),
    "fp8-rowwise": (torch.float8_e4m3fn, "rowwise"),
    "mxfp8": (torch.float8_e4m3fn, "mxfp8"),
    "mxfp4": (torch.float4_e2m1fn_x2, "mxfp4"),
    "nvfp4": (torch.float4_e2m1fn_x2, "nvfp4"),
}


@pytest.mark.filterwarnings("ignore")  # of torchao's own
@pytest.mark.parametrize("name", NAMES)
def test_inference_takes_as_long_as_torchaos_roofline_says(name):
    roofline = pytest.importorskip("torchao.testing.training.roofline_utils")
    for form in ("bf16", *forecast_on(name)):
        dtype, kind = RECIPES[form]
        block = kind if kind and kind.startswith(("mx", "nv")) else None
        for m, k, n in SIZES:
            gemm = roofline.get_inference_gemm_time_sympy
            expected = gemm(m, k, n, dtype, block, NAMES[name])
            if kind:
                expected += roofline.get_inference_float8_mem_sympy(m, k, n, kind, NAMES[name])
            found = forward_s(GPUS[name], FORMATS[form], m, k, n)
            assert math.isclose(found, float(expected), rel_tol=1e-9)


def gain(name: str, form: str, *size: int) -> float:
    bf16_s, form_s = (step_s(GPUS[name], FORMATS[each], *size) for each in ("bf16", form))
    return bf16_s / form_s


def test_small_layers_lose_and_large_ones_gain():
    assert gain("h100", "fp8-rowwise", 1024, 2048, 1024) < 0.8
    assert gain("h100", "fp8-rowwise", 4096, 8192, 16384) > 1.3
    for form in forecast_on("b200"):
        assert gain("b200", form, 16384, 8192, 8192) > 1


@pytest.mark.parametrize("name", GPUS)
def test_each_gpu_has_what_its_forecasts_need(name):
    for form in forecast_on(name):
        assert gain(name, form, 16384, 8192, 8192) > 1


def test_a_forecast_needs_a_rate_and_a_recipe():
    assert forecast_on("h100") == ["fp8", "fp8-rowwise"]
    assert forecast_on("b200") == ["fp8", "fp8-rowwise", "mxfp8", "mxfp4", "nvfp4"]
    assert forecast_on("a100") == []
    assert "mxfp4" not in forecast_on("mi355x")  # no rate of four bits is in the table
