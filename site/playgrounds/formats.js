/* Number formats: what bits mean, and how a number is rounded to them.

   Values are float64, which holds every number of these formats exactly. A pattern is the integer
   that the bits spell. Plain script, without modules: browsers refuse those from file://. The tests
   hold every function against torch. */
"use strict";

const AmpFormats = (() => {
  /* `special` says what the largest exponent means.
     ieee: infinity, and NaNs; nan: a number, but for the last pattern, which is NaN;
     none: a number; scale: the last pattern is NaN, and there is neither a sign nor zero. */
  const FORMATS = [
    { key: "fp32", name: "fp32", sign: 1, exponent: 8, mantissa: 23, bias: 127, special: "ieee" },
    { key: "tf32", name: "tf32", sign: 1, exponent: 8, mantissa: 10, bias: 127, special: "ieee" },
    { key: "bf16", name: "bf16", sign: 1, exponent: 8, mantissa: 7, bias: 127, special: "ieee" },
    { key: "fp16", name: "fp16", sign: 1, exponent: 5, mantissa: 10, bias: 15, special: "ieee" },
    { key: "e5m2", name: "E5M2", sign: 1, exponent: 5, mantissa: 2, bias: 15, special: "ieee" },
    { key: "e4m3", name: "E4M3", sign: 1, exponent: 4, mantissa: 3, bias: 7, special: "nan" },
    { key: "e2m1", name: "E2M1", sign: 1, exponent: 2, mantissa: 1, bias: 1, special: "none" },
    { key: "e8m0", name: "E8M0", sign: 0, exponent: 8, mantissa: 0, bias: 127, special: "scale" },
  ];
  for (const format of FORMATS) {
    format.width = format.sign + format.exponent + format.mantissa;
    format.signBit = format.sign ? 2 ** (format.width - 1) : 0;
    const patterns = 2 ** (format.exponent + format.mantissa);
    // The pattern of the largest finite number.
    format.last =
      patterns - { ieee: 2 ** format.mantissa + 1, nan: 2, none: 1, scale: 2 }[format.special];
  }
  const byKey = (key) => FORMATS.find((format) => format.key === key);

  const fields = (format, pattern) => ({
    sign: format.sign ? Math.floor(pattern / format.signBit) : 0,
    exponent: Math.floor(pattern / 2 ** format.mantissa) % 2 ** format.exponent,
    mantissa: pattern % 2 ** format.mantissa,
  });

  const bits = (format, pattern) => pattern.toString(2).padStart(format.width, "0");

  /** The number that a pattern stands for. */
  function decode(format, pattern) {
    const { sign, exponent, mantissa } = fields(format, pattern);
    const magnitude = format.sign ? pattern % format.signBit : pattern;
    if (magnitude > format.last) {
      if (format.special !== "ieee" || mantissa !== 0) return NaN;
      return sign ? -Infinity : Infinity;
    }
    if (format.special === "scale") return 2 ** (pattern - format.bias);
    const value =
      exponent === 0
        ? mantissa * 2 ** (1 - format.bias - format.mantissa) // subnormal: 0.mantissa
        : (2 ** format.mantissa + mantissa) * 2 ** (exponent - format.bias - format.mantissa);
    return sign ? -value : value;
  }

  /* The exponent of a magnitude above zero. */
  const view = new DataView(new ArrayBuffer(8));
  function floorLog2(magnitude) {
    view.setFloat64(0, magnitude);
    return (view.getUint32(0) >>> 20) - 1023; // below 2^-1022 it is -1023, which is as good here
  }

  /* The pattern at or below a finite magnitude, and how far the way to the next one is gone, as a
     share of that way; `tail` is the way gone, `gap` the whole of it. */
  function below(format, magnitude) {
    const scale = format.special === "scale";
    const lowest = scale ? -format.bias : 1 - format.bias;
    const exponent = Math.max(floorLog2(magnitude), lowest);
    if (scale) {
      const pattern = Math.min(exponent + format.bias, format.last);
      const value = decode(format, pattern);
      return { pattern, tail: Math.max(magnitude - value, 0), gap: value };
    }
    const gap = 2 ** (exponent - format.mantissa);
    const units = Math.floor(magnitude / gap);
    const pattern = units + (exponent - lowest) * 2 ** format.mantissa;
    if (pattern > format.last) {
      const largest = decode(format, format.last);
      return { pattern: format.last, tail: magnitude - largest, gap: spacing(format, format.last) };
    }
    return { pattern, tail: magnitude - units * gap, gap };
  }

  /** The distance to the next larger magnitude, as the exponent of a pattern has it. */
  function spacing(format, pattern) {
    const { exponent } = fields(format, pattern);
    if (format.special === "scale") return 2 ** (exponent - format.bias);
    return 2 ** (Math.max(exponent, 1) - format.bias - format.mantissa);
  }

  const nanPattern = (format) =>
    ({
      ieee: format.last + 1 + (format.mantissa ? 2 ** (format.mantissa - 1) : 0),
      nan: format.last + 1,
      none: null,
      scale: format.last + 1,
    })[format.special];

  /* Up or down from what `below` found? */
  function nearestIsUp(format, { pattern, tail, gap }, magnitude) {
    if (format.special === "scale") {
      // As torch does it: a tie goes up, and below the smallest normal fp32 number all goes up.
      return magnitude < 2 ** (1 - format.bias) ? tail > 0 : 2 * tail >= gap;
    }
    return 2 * tail > gap || (2 * tail === gap && pattern % 2 === 1); // ties to even
  }

  function finish(format, pattern, negative) {
    const signed = pattern + (negative ? format.signBit : 0);
    return { pattern: signed, value: decode(format, signed) };
  }

  function round(format, value, isUp) {
    if (Number.isNaN(value)) {
      const pattern = nanPattern(format);
      return { pattern, value: NaN };
    }
    const negative = value < 0 || Object.is(value, -0);
    const magnitude = Math.abs(value);
    if (magnitude === Infinity || (format.special === "scale" && magnitude >= 2 ** 128)) {
      // Without an infinity the largest number stands for it; a scale has NaN.
      const saturates = format.special === "nan" || format.special === "none";
      return finish(format, saturates ? format.last : format.last + 1, negative);
    }
    const at = below(format, magnitude);
    const up = isUp(at, magnitude);
    const saturates = format.special === "nan" || format.special === "none";
    const pattern = up && !(saturates && at.pattern === format.last) ? at.pattern + 1 : at.pattern;
    return finish(format, pattern, negative);
  }

  /** The nearest number of a format, ties to even: `{pattern, value}`. */
  const roundNearest = (format, value) =>
    round(format, value, (at, magnitude) => nearestIsUp(format, at, magnitude));

  /** The chance that stochastic rounding takes the neighbour that is larger in magnitude. */
  function chanceUp(format, value) {
    if (!Number.isFinite(value)) return 0;
    const { tail, gap } = below(format, Math.abs(value));
    return Math.min(tail / gap, 1);
  }

  /** Stochastic rounding: away from zero if `draw`, from [0, 1), is below `chanceUp`. */
  const roundStochastic = (format, value, draw) =>
    round(format, value, ({ tail, gap }) => draw < tail / gap);

  /** The next pattern up (`by` = 1) or down (-1) in the order of values; null where there is none. */
  function neighbour(format, pattern, by) {
    if (pattern === null || Number.isNaN(decode(format, pattern))) return null;
    const negative = format.sign && pattern >= format.signBit;
    const magnitude = negative ? pattern - format.signBit : pattern;
    let next = magnitude + (negative ? -by : by);
    let nextNegative = negative;
    if (next < 0) {
      if (!format.sign) return null;
      next = 1; // across zero, which has two patterns
      nextNegative = !negative;
    }
    const found = finish(format, next, nextNegative);
    return next > format.last + 1 || Number.isNaN(found.value) ? null : found;
  }

  /** What becomes of a value, in a word or two; empty for what is merely rounded. */
  function remark(format, value, result) {
    if (Number.isNaN(value)) return format.special === "none" ? "has no NaN" : "";
    if (format.special === "scale") {
      if (Number.isNaN(result.value)) return "too large: NaN";
      if (value <= 0) return value === 0 ? "has no zero" : "has no sign";
      return "";
    }
    if (Math.abs(value) === Infinity) {
      return Number.isFinite(result.value) ? "has no infinity: saturates" : "";
    }
    if (!Number.isFinite(result.value)) return "overflows";
    const largest = decode(format, format.last);
    if (Math.abs(value) > largest && Math.abs(result.value) === largest) {
      return format.special === "ieee" ? "" : "saturates";
    }
    if (value !== 0 && result.value === 0) return "underflows to zero";
    const { exponent, mantissa } = fields(format, result.pattern);
    return exponent === 0 && mantissa !== 0 ? "subnormal" : "";
  }

  const LONGEST = 400;
  const quoted = (text) => `“${text.length > 40 ? `${text.slice(0, 40)}…` : text}”`;

  /** Read what somebody typed: `{value, line}` or `{pattern, line}`, or `{error}` in a line. */
  function parse(typed, format) {
    const text = typed.trim().replace(/[\u2212\u2013]/g, "-");
    if (text === "") return { error: "Type a number, such as 0.1, 1e-8 or inf." };
    if (text.length > LONGEST) {
      const count = text.length.toLocaleString("en");
      return { error: `These are ${count} characters; give at most ${LONGEST}.` };
    }
    if (/^0x[0-9a-f]+$/i.test(text) || /^0b[01]+$/i.test(text)) return parseBits(text, format);
    if (/^[+-]?inf(inity)?$/i.test(text)) {
      return { value: text.startsWith("-") ? -Infinity : Infinity, line: "" };
    }
    if (/^[+-]?nan$/i.test(text)) return { value: NaN, line: "" };
    const power = /^([+-]?)2(?:\*\*|\^)([+-]?\d+)$/.exec(text);
    if (power) return { value: (power[1] === "-" ? -1 : 1) * 2 ** Number(power[2]), line: "" };
    const number = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.exec(text);
    if (!number) {
      const hint = /^[+-]?\d*,\d+$/.test(text) ? "write a point, as in 0.1" : "try 0.1, 1e-8, inf, or bits, 0x2e";
      return { error: `${quoted(text)} is no number that can be read here: ${hint}.` };
    }
    const value = Number(text);
    if (!Number.isFinite(value)) {
      return { value, line: `${quoted(text)} is beyond float64, and is read as infinity.` };
    }
    if (value === 0 && /[1-9]/.test(number[1])) {
      return { value, line: `${quoted(text)} is too small for float64, and is read as zero.` };
    }
    return { value, line: "" };
  }

  function parseBits(text, format) {
    const pattern = BigInt(text);
    if (pattern >= 2n ** BigInt(format.width)) {
      const needed = pattern.toString(2).length;
      const what = `${quoted(text)} needs ${needed} bits, and ${format.name} has ${format.width}`;
      return { error: `${what}: choose a wider format.` };
    }
    return { pattern: Number(pattern), line: `${quoted(text)} is read as the bits of ${format.name}.` };
  }

  return {
    FORMATS, byKey, fields, bits, decode, roundNearest, roundStochastic, chanceUp, spacing, neighbour,
    remark, parse, quoted, floorLog2,
  };
})();

if (typeof module !== "undefined") module.exports = AmpFormats; // for node
