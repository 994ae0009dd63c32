/* Block scaling: rows of values, quantised with scales for a tensor, a row or a block. */
"use strict";

const AmpBlocks = (() => {
  const F = typeof require === "undefined" ? AmpFormats : require("./formats.js");
  const E4M3 = F.byKey("e4m3");
  const E2M1 = F.byKey("e2m1");
  const largest = (format) => F.decode(format, format.last);
  const amax = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);

  /* Each scheme makes of a block of values, and the amax of the whole tensor, the scale that they
     are divided by. A scale is a float32, but where it is stored in fewer bits. */
  const powerOfTwo = (format) => (block) => {
    const most = amax(block);
    if (most === 0) return 2 ** -127;
    const exponent = F.floorLog2(most) - F.floorLog2(largest(format));
    return 2 ** Math.min(Math.max(exponent, -127), 127);
  };
  const toLargest = (block) => {
    const most = amax(block);
    return most === 0 ? 1 : Math.fround(most / largest(E4M3));
  };
  const nvfp4 = (block, whole) => {
    if (whole === 0) return 1;
    const tensor = Math.fround(whole / (largest(E4M3) * largest(E2M1)));
    const wanted = Math.fround(Math.fround(amax(block) / largest(E2M1)) / tensor);
    const stored = F.roundNearest(E4M3, Math.max(wanted, 2 ** -6)).value;
    return Math.fround(stored * tensor);
  };
  const SCHEMES = [
    { key: "tensorwise", name: "E4M3 per tensor", format: E4M3, block: Infinity, scaleBits: 0, scale: toLargest },
    { key: "rowwise", name: "E4M3 per row", format: E4M3, block: null, scaleBits: 32, scale: toLargest },
    { key: "mxfp8", name: "MXFP8 per 32 values", format: E4M3, block: 32, scaleBits: 8, scale: powerOfTwo(E4M3) },
    { key: "mxfp4", name: "MXFP4 per 32 values", format: E2M1, block: 32, scaleBits: 8, scale: powerOfTwo(E2M1) },
    { key: "nvfp4", name: "NVFP4 per 16 values", format: E2M1, block: 16, scaleBits: 8, scale: nvfp4 },
  ];

  function quantised(values, scale, format) {
    const most = largest(format);
    return values.map((value) => {
      const scaled = Math.fround(value / scale);
      const clamped = Math.min(Math.max(scaled, -most), most);
      return Math.fround(F.roundNearest(format, clamped).value * scale);
    });
  }

  /** The rows as they come back from a scheme: `{rows, bits}`, bits being those of a value. */
  function apply(scheme, rows) {
    const whole = amax(rows.flat());
    const length = rows[0].length;
    const block = scheme.block === null ? length : Math.min(scheme.block, length);
    const made = rows.map((row) => {
      if (scheme.block === Infinity) return quantised(row, scheme.scale(rows.flat(), whole), scheme.format);
      const out = [];
      for (let i = 0; i < length; i += block) {
        const part = row.slice(i, i + block);
        out.push(...quantised(part, scheme.scale(part, whole), scheme.format));
      }
      return out;
    });
    const bits = scheme.format.width + (scheme.scaleBits ? scheme.scaleBits / block : 0);
    return { rows: made, bits };
  }

  /** What a row lost: the signal to noise ratio in dB, but for the outlier at a place, if there is
      one, beside which any noise is small; and the share that became zero. */
  function loss(before, after, outlier = -1) {
    let signal = 0, noise = 0, zeros = 0;
    before.forEach((value, i) => {
      if (i !== outlier) {
        signal += value ** 2;
        noise += (value - after[i]) ** 2;
      }
      if (value !== 0 && after[i] === 0) zeros += 1;
    });
    return { sqnr: noise === 0 ? Infinity : 10 * Math.log10(signal / noise), zeros: zeros / before.length };
  }

  const LONGEST = 20000;
  /** Read values that somebody typed, with commas or blanks between: `{values}` or `{error}`. */
  function parse(text) {
    if (text.length > LONGEST) return { error: `These are ${text.length.toLocaleString("en")} characters; give at most ${LONGEST.toLocaleString("en")}.` };
    const words = text.split(/[\s,;]+/).filter(Boolean);
    if (words.length === 0) return { error: "Type some numbers, with commas between." };
    if (words.length > 256) return { error: `These are ${words.length} numbers; give at most 256.` };
    const values = [];
    for (const word of words) {
      const { value, error } = F.parse(word, F.byKey("fp32"));
      if (error !== undefined || value === undefined) return { error: `${F.quoted(word)} is no number: write 0.5 or 1e-3.` };
      if (!Number.isFinite(Math.fround(value))) return { error: `${F.quoted(word)} is not finite in fp32, so there is no scale for it.` };
      values.push(Math.fround(value));
    }
    return { values };
  }

  return { SCHEMES, apply, loss, parse };
})();

if (typeof module !== "undefined") module.exports = AmpBlocks;
