"""The playgrounds' arithmetic against torch's, in a real browser."""

import base64
import math
import re

import pytest
import torch
from site_pages import PLAYGROUNDS, chromium
from torch import Tensor, nn

from amp_lab import forecast_memory

pytestmark = pytest.mark.slow
RANDOM = 100_000
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e5m2": torch.float8_e5m2,
    "e4m3": torch.float8_e4m3fn,
    "e8m0": torch.float8_e8m0fnu,
}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
# Compares in the browser, and sends back only what differs.
COMPARE = """([key, given, expected, way]) => {
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
  const F = AmpFormats, format = F.byKey(key);
  const values = new Float64Array(bytes(given)), wanted = new Float64Array(bytes(expected));
  const ways = {
    decode: (x) => F.decode(format, x),
    round: (x) => {
      const { pattern, value } = F.roundNearest(format, x);
      const agree = pattern === null || Object.is(F.decode(format, pattern), value);
      return agree ? value : `${value}, but not by its bits ${pattern}`;
    },
  };
  const differ = [];
  values.forEach((x, i) => {
    const got = ways[way](x);
    if (!Object.is(got, wanted[i])) differ.push([x, got, wanted[i]].map(String));
  });
  return [values.length, differ.slice(0, 5)];
}"""


@pytest.fixture(scope="module")
def page():
    with chromium() as browser:
        page = browser.new_page()
        page.set_content("<!doctype html><title>Arithmetic</title>")
        for name in ("formats.js", "scaler.js", "blocks.js", "memory.js", "gpus.js"):
            page.add_script_tag(path=PLAYGROUNDS / name)
        yield page


def encoded(values: Tensor) -> str:
    return base64.b64encode(values.double().contiguous().numpy().tobytes()).decode()


def differences(page, key: str, given: Tensor, expected: Tensor, way: str) -> list:
    # A NaN has a sign and a payload, which do not count here.
    count, differ = page.evaluate(COMPARE, [key, encoded(given), encoded(expected), way])
    assert count == given.numel() > 0
    return differ


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All bit patterns of a dtype, or, of 32 bits, many random ones with the special ones."""
    bits = 8 * dtype.itemsize
    if bits < 32:
        return torch.arange(2**bits)
    special = [0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x33000000]
    special += [0x80000000 + pattern for pattern in special]
    generator = torch.Generator().manual_seed(0)
    return torch.cat([torch.tensor(special), torch.randint(2**32, (RANDOM,), generator=generator)])


def as_dtype(patterns: Tensor, dtype: torch.dtype) -> Tensor:
    return patterns.to(INTEGERS[dtype.itemsize]).view(dtype)


@pytest.mark.parametrize("key", DTYPES)
def test_patterns_mean_what_they_mean_in_torch(page, key):
    patterns = every_pattern(DTYPES[key])
    expected = as_dtype(patterns, DTYPES[key]).float()
    assert differences(page, key, patterns, expected, "decode") == []


def test_the_patterns_of_e2m1_and_tf32(page):
    four_bits = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = torch.tensor([*four_bits, *(-value for value in four_bits)])
    expected[8] = -0.0
    assert differences(page, "e2m1", torch.arange(16), expected, "decode") == []
    tf32 = torch.arange(2**19)[::7]
    expected = (tf32 << 13).to(torch.int32).view(torch.float32)
    assert differences(page, "tf32", tf32, expected, "decode") == []


def hard_values(key: str) -> Tensor:
    """fp32 numbers of every kind, and the ties of a format with their neighbours."""
    many = as_dtype(every_pattern(torch.float32), torch.float32)
    generator = torch.Generator().manual_seed(1)
    usual = torch.randn(RANDOM, generator=generator) * 2.0 ** torch.randint(
        -30, 20, (RANDOM,), generator=generator
    )
    parts = [many, usual]
    if key not in ("fp32", "tf32", "e2m1"):
        grid = as_dtype(every_pattern(DTYPES[key]), DTYPES[key]).float()
        grid = grid[grid.isfinite()].sort().values
        ties = (grid[:-1].double() / 2 + grid[1:].double() / 2).float()
        up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
        parts += [grid, ties, ties.nextafter(up), ties.nextafter(down)]
    if key == "e2m1":
        parts.append(torch.arange(-8, 8, 0.125))
    return torch.cat(parts)


def rounded(values: Tensor, key: str) -> Tensor:
    """The nearest numbers of a format by torch; of two formats that it does not have, by hand."""
    if key == "tf32":
        bits = values.view(torch.int32).long() & 0xFFFFFFFF
        bits = (bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF
        result = bits.to(torch.int32).view(torch.float32)
        return torch.where(values.isfinite(), result, values)
    if key == "e2m1":
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        ties = (grid[:-1] + grid[1:]) / 2
        below = torch.bucketize(values.abs(), ties)  # a tie goes to the lower one …
        above = torch.bucketize(values.abs(), ties, right=True)
        index = torch.where(below % 2 == 0, below, above)  # … unless that is the odd one
        return torch.where(values.isnan(), values, grid[index].copysign(values))
    return values.to(DTYPES[key]).float()


@pytest.mark.parametrize("key", [*DTYPES, "tf32", "e2m1"])
def test_rounding_to_nearest_is_torchs(page, key):
    values = hard_values(key)
    expected = rounded(values, key)
    if key == "e4m3" and torch.tensor(1e3).to(torch.float8_e4m3fn).float().isnan():
        values, expected = (x[values.abs() <= 464] for x in (values, expected))  # torch up to 2.12
    assert differences(page, key, values, expected, "round") == []


def test_float64_becomes_float32_as_in_torch(page):
    generator = torch.Generator().manual_seed(2)
    random = torch.randint(-(2**63), 2**63 - 1, (RANDOM,), generator=generator).view(torch.float64)
    near = torch.randn(RANDOM, generator=generator, dtype=torch.float64)
    tiny = near * 2.0**-140
    values = torch.cat([random, near, tiny])
    assert differences(page, "fp32", values, values.float(), "round") == []


def test_stochastic_rounding_is_that_of_the_bits(page):
    """Up if a random number of 16 bits is below the bits that bf16 drops, as torchao has it."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(2000, generator=generator)
    draws = torch.randint(2**16, (2000,), generator=generator)
    bits = values.view(torch.int32)
    up = (draws < (bits & 0xFFFF)).int() * 0x10000
    expected = ((bits & ~0xFFFF) + up).view(torch.float32)
    got = page.evaluate(
        "([x, d]) => { const F = AmpFormats, f = F.byKey('bf16');"
        " return x.map((v, i) => F.roundStochastic(f, v, d[i]).value); }",
        [values.tolist(), (draws / 2**16).tolist()],
    )
    assert got == expected.tolist()


def test_neighbours_are_the_next_numbers_of_the_format(page):
    for key in ("e4m3", "e5m2"):
        grid = as_dtype(torch.arange(256), DTYPES[key]).float()
        grid = grid[~grid.isnan()].unique()
        walk = f"""() => {{ const F = AmpFormats, f = F.byKey('{key}'); const out = [];
          let at = F.roundNearest(f, {float(grid[0]) if key == "e4m3" else "-Infinity"});
          while (at) {{ out.push(String(at.value)); at = F.neighbour(f, at.pattern, 1); }}
          return out; }}"""
        got = [float(text.replace("Infinity", "inf")) for text in page.evaluate(walk)]
        assert got == grid.tolist()


def test_the_scaler_follows_torchs_rule(page):
    generator = torch.Generator().manual_seed(4)
    found = (torch.rand(300, generator=generator) < 0.05).tolist()
    scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    expected = []
    for flag in found:
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(flag)), 2.0, 0.5, 7)
        expected.append(scale.item())
    got = page.evaluate(
        "(found) => { const s = new AmpScaler.Scaler({interval: 7});"
        " return found.map((f) => (s.update(f), s.scale)); }",
        found,
    )
    assert got == expected


def block_scaled(rows: Tensor, key: str) -> Tensor:
    """What block scaling keeps, with torch's own casts."""
    if key in ("tensorwise", "rowwise"):
        amax = rows.abs().max() if key == "tensorwise" else rows.abs().amax(1, keepdim=True)
        scale = amax / 448
        return (rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    length, largest = (16, 6) if key == "nvfp4" else (32, 448 if key == "mxfp8" else 6)
    blocks = rows.reshape(-1, length)
    amax = blocks.abs().amax(1, keepdim=True)
    if key == "nvfp4":
        tensor = rows.abs().max() / (448 * 6)
        wanted = (amax / 6 / tensor).clamp(2.0**-6, 448)
        scale = wanted.to(torch.float8_e4m3fn).float() * tensor
    else:
        scale = 2.0 ** (amax.log2().floor() - (8 if key == "mxfp8" else 2))
    scaled = (blocks / scale).clamp(-largest, largest)
    low = rounded(scaled, "e4m3" if key == "mxfp8" else "e2m1")
    return (low * scale).reshape(rows.shape)


@pytest.mark.parametrize("key", ["tensorwise", "rowwise", "mxfp8", "mxfp4", "nvfp4"])
def test_blocks_are_scaled_as_torch_would(page, key):
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(4, 64, generator=generator)
    rows[0, 20], rows[2] = 300.0, rows[2] * 1e-3
    got = page.evaluate(
        "([key, rows]) => AmpBlocks.apply(AmpBlocks.SCHEMES.find((s) => s.key === key), rows).rows",
        [key, rows.tolist()],
    )
    torch.testing.assert_close(torch.tensor(got), block_scaled(rows, key), rtol=0, atol=0)


def test_what_a_row_lost_leaves_the_outlier_out(page):
    before, after = [1.0, 1000.0, -2.0, 0.5], [1.0, 900.0, -1.0, 0.0]
    lost = "([before, after, outlier]) => AmpBlocks.loss(before, after, outlier)"
    others = page.evaluate(lost, [before, after, 1])
    assert others["sqnr"] == pytest.approx(10 * math.log10(5.25 / 1.25))
    assert others["zeros"] == 0.25
    whole = page.evaluate(lost, [before, after, -1])
    assert whole["sqnr"] == pytest.approx(10 * math.log10(1000005.25 / 10001.25))


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-momentum", "adam"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_is_what_the_forecast_says(page, precision, optimizer):
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    inputs = torch.empty(8, 256, device="meta")
    forecast = forecast_memory(model, inputs, precision=precision, optimizer=optimizer)
    settings = {
        "parameters": 4 * 256 * 256, "optimizer": optimizer, "sharding": "none", "processes": 1,
        "precision": "amp" if precision == "bf16" else "fp32",
    }  # fmt: skip
    parts = page.evaluate("(settings) => AmpMemory.parts(settings)", settings)
    expected = [forecast.weights, forecast.cast_cache, forecast.gradients, forecast.optimizer]
    got = [parts[name] for name in ("weights", "casts", "gradients", "optimizer")]
    # Adam also counts its steps, with one number for each parameter tensor.
    assert all(0 <= e - g <= 64 for e, g in zip(expected, got, strict=True)), (expected, got)


def test_the_table_for_those_without_javascript_is_right(page):
    text = (PLAYGROUNDS / "number_formats.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| [^|]* \| ([\d.]+) \| ", text, re.MULTILINE)
    got = page.evaluate(
        "() => AmpFormats.FORMATS.map((f) => [f.name, AmpFormats.roundNearest(f, 0.1).value])"
    )
    assert sorted((name, float(value)) for name, value in rows) == sorted(map(tuple, got))


UNREADABLE = "is no number.*: try .* bits, 0x2e."


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("0.1", {"value": 0.1, "line": ""}),
        ("-0", {"value": -0.0, "line": ""}),
        ("1e999", {"line": "“1e999” .* float64, .* infinity."}),
        ("1e-999", {"value": 0, "line": "“1e-999” .* float64, .* zero."}),
        ("nan", {"line": ""}),
        ("0x7f", {"pattern": 127, "line": "“0x7f” .* bits of E4M3."}),
        ("0x7ff", {"error": "“0x7ff” needs 11 bits, .*E4M3 has 8: .*"}),
        ("½", {"error": f"“½” {UNREADABLE}"}),
        ("0,1", {"error": "“0,1” is no number.* point, .* 0.1."}),
        ("", {"error": "Type a number, .*"}),
        ("1" * 2**20, {"error": ".* 1,048,576 characters; .* 400."}),
        ("__proto__", {"error": f"“__proto__” {UNREADABLE}"}),
    ],
    ids=lambda value: str(value)[:12] if isinstance(value, str) else "",
)  # fmt: skip
def test_whatever_is_typed_has_an_answer_in_a_line(page, typed, answer):
    got = page.evaluate("(text) => AmpFormats.parse(text, AmpFormats.byKey('e4m3'))", typed)
    for name, expected in answer.items():
        if isinstance(expected, str):
            assert re.fullmatch(expected, got[name])
        else:
            assert got[name] == expected
