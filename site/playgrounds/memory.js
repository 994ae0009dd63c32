/* The memory of a training step, for the parts that are formulas: what `forecast_memory` counts
   for weights, casts, gradients and optimizer state. Activations need the model itself. */
"use strict";

const AmpMemory = (() => {
  const PRECISIONS = [
    { key: "fp32", name: "fp32 or tf32", weights: 4, casts: 0 },
    { key: "amp", name: "autocast to bf16 or fp16", weights: 4, casts: 2 },
    { key: "bf16", name: "weights in bf16", weights: 2, casts: 0 },
  ];
  // Copies of the weights, in their dtype, that the optimizer keeps.
  const OPTIMIZERS = [
    { key: "sgd", name: "SGD", copies: 0 },
    { key: "sgd-momentum", name: "SGD with momentum", copies: 1 },
    { key: "adam", name: "Adam or AdamW", copies: 2 },
  ];
  const SHARDINGS = [
    { key: "none", name: "none (DDP)", stage: 0 },
    { key: "zero1", name: "optimizer state (ZeRO-1)", stage: 1 },
    { key: "zero2", name: "and gradients (ZeRO-2)", stage: 2 },
    { key: "fsdp", name: "and weights (FSDP, ZeRO-3)", stage: 3 },
  ];

  /** Bytes on each process: `{weights, casts, gradients, optimizer, activations, total}`. */
  function parts({ parameters, precision, optimizer, sharding, processes, activations = 0, batch = 1 }) {
    const kind = PRECISIONS.find(({ key }) => key === precision);
    const { copies } = OPTIMIZERS.find(({ key }) => key === optimizer);
    const { stage } = SHARDINGS.find(({ key }) => key === sharding);
    const share = (from) => (stage >= from ? 1 / processes : 1);
    const found = {
      weights: parameters * kind.weights * share(3),
      // FSDP gathers, and casts, one unit at a time, and keeps no copy of all weights.
      casts: stage >= 3 ? 0 : parameters * kind.casts,
      gradients: parameters * kind.weights * share(2),
      optimizer: parameters * kind.weights * copies * share(1),
      activations: activations * batch,
    };
    return { ...found, total: Object.values(found).reduce((sum, bytes) => sum + bytes, 0) };
  }

  const UNITS = { "": 1, k: 1e3, m: 1e6, b: 1e9, g: 1e9, t: 1e12 };
  /** Read a count such as 7B, 125M or 1.3e9: `{value}` or `{error}` in a line. */
  function parseCount(typed, name) {
    const text = typed.trim();
    const shown = text.length > 40 ? `${text.slice(0, 40)}…` : text;
    const found = text.length <= 400 && /^(\d+\.?\d*|\.\d+)(e\+?\d+)?\s*([kmbgt]?)$/i.exec(text);
    if (!found) return { error: `${name}: “${shown}” is no number that can be read here; try 7B, 125M or 1.3e9.` };
    const value = Number(found[1] + (found[2] ?? "")) * UNITS[found[3].toLowerCase()];
    if (value > 1e15) return { error: `${name}: “${shown}” is more than any model has; give at most 1e15.` };
    return { value };
  }

  return { PRECISIONS, OPTIMIZERS, SHARDINGS, parts, parseCount };
})();

if (typeof module !== "undefined") module.exports = AmpMemory;
