/* The loss scale: gradients in a format's range, and the scaler that looks for it. */
"use strict";

const AmpScaler = (() => {
  const F = typeof require === "undefined" ? AmpFormats : require("./formats.js");

  /** Gradients whose magnitudes are spread around 2^`centre` by `spread` powers of two (1 sigma). */
  function gradients({ count, centre, spread, random }) {
    return Array.from({ length: count }, () => {
      const normal = Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());
      return (random() < 0.5 ? -1 : 1) * 2 ** (centre + spread * normal);
    });
  }

  /** How many of the gradients times `scale` are zero, subnormal, normal or infinite in a format. */
  function outcome(values, scale, format) {
    const counts = { zero: 0, subnormal: 0, normal: 0, overflow: 0 };
    const largest = F.decode(format, format.last);
    for (const value of values) {
      const result = F.roundNearest(format, value * scale);
      const magnitude = Math.abs(result.value);
      if (!Number.isFinite(magnitude) || Math.abs(value * scale) > 2 * largest) counts.overflow += 1;
      else if (magnitude === 0) counts.zero += 1;
      else if (F.fields(format, result.pattern).exponent === 0) counts.subnormal += 1;
      else counts.normal += 1;
    }
    return counts;
  }

  /** The rule of `torch.amp.GradScaler`: halve after an overflow, double after enough good steps. */
  class Scaler {
    constructor({ scale = 2 ** 16, growth = 2, backoff = 0.5, interval = 2000 } = {}) {
      Object.assign(this, { scale: Math.fround(scale), growth, backoff, interval, good: 0 });
    }

    /** After a step; returns whether the optimizer's step is skipped. */
    update(foundInf) {
      if (foundInf) {
        this.scale = Math.fround(this.scale * this.backoff);
        this.good = 0;
        return true;
      }
      this.good += 1;
      if (this.good === this.interval) {
        const larger = Math.fround(this.scale * this.growth);
        if (Number.isFinite(larger)) this.scale = larger;
        this.good = 0;
      }
      return false;
    }
  }

  return { gradients, outcome, Scaler };
})();

if (typeof module !== "undefined") module.exports = AmpScaler;
