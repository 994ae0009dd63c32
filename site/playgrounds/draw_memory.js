/* The playground of memory: what a training step keeps, in stacked bars. */
"use strict";

AmpPlayground.register("memory", (box) => {
  const M = AmpMemory;
  const { el, svg } = AmpPlayground;
  const FREE = 0.1; // the share of the memory that is left to the driver and to fragmentation
  const PARTS = ["weights", "casts", "gradients", "optimizer", "activations"];
  const NAMES = ["weights", "weights cast by autocast", "gradients", "optimizer state", "activations"];
  const SHADES = [0.95, 0.35, 0.7, 0.5, 0.2];
  const state = {
    parameters: 7e9, optimizer: "adam", sharding: "none", processes: 8, activations: 0, batch: 1,
  };
  const problem = el("p", { class: "pg-problem", role: "status", "aria-live": "polite" });
  const status = AmpPlayground.status();
  const results = el("div");

  function number(label, key, value, hint, { least = 0, factor = 1, whole = false } = {}) {
    const input = el("input", { type: "text", inputmode: "decimal", autocomplete: "off", value });
    input.addEventListener("input", () => {
      const { value: read, error } = M.parseCount(input.value, label);
      const wrong = error ?? (read < least || (whole && !Number.isInteger(read)) ? `${label}: give ${whole ? "a whole number of " : ""}at least ${least}.` : "");
      problem.textContent = wrong;
      if (wrong) return input.setAttribute("aria-invalid", "true");
      input.removeAttribute("aria-invalid");
      state[key] = read * factor;
      return show();
    });
    return AmpPlayground.labelled(label, input, hint);
  }
  const choice = (label, key, table) =>
    AmpPlayground.labelled(label, AmpPlayground.select(table.map((row) => [row.key, row.name]), state[key],
      (value) => ((state[key] = value), show())));

  box.append(
    el("div", { class: "pg-row" },
      number("Parameters", "parameters", "7B", "As 7B, 125M or 1.3e9.", { least: 1 }),
      choice("Optimizer", "optimizer", M.OPTIMIZERS)),
    el("div", { class: "pg-row" },
      choice("Sharded over the processes", "sharding", M.SHARDINGS),
      number("Processes", "processes", "8", "One for each GPU.", { least: 1, whole: true })),
    el("div", { class: "pg-row" },
      number("Batch of each process", "batch", "1", "", { least: 1, whole: true }),
      number("Activations of one sample, in MiB", "activations", "0",
        "No formula has them: the command amp-lab memory forecasts them for your model.", { factor: 2 ** 20 })),
    problem, results, status,
  );

  const gib = (bytes) => `${Number((bytes / 2 ** 30).toPrecision(3)).toLocaleString("en")} GiB`;

  function bar(found, most, name) {
    let x = 0;
    const parts = PARTS.map((part, i) => {
      const width = (600 * found[part]) / most;
      x += width;
      return svg("rect", { x: x - width, y: 2, width, height: 22, class: "pg-bar", "fill-opacity": SHADES[i], stroke: "currentColor", "stroke-width": 0.5 });
    });
    return svg("svg", { viewBox: "0 0 600 26", role: "img", "aria-label": `${name}: ${gib(found.total)}` }, parts);
  }

  function show() {
    const found = M.PRECISIONS.map((precision) => ({ ...precision, bytes: M.parts({ ...state, precision: precision.key }) }));
    const most = Math.max(...found.map(({ bytes }) => bytes.total));
    const rows = PARTS.map((part, i) => ({ cells: [NAMES[i], ...found.map(({ bytes }) => gib(bytes[part]))] }));
    rows.push({ chosen: true, cells: ["together", ...found.map(({ bytes }) => gib(bytes.total))] });
    rows.push({ cells: ["as bars", ...found.map(({ bytes, name }) => bar(bytes, most, name))] });
    const heads = ["each process keeps", ...found.map(({ name }) => name)];
    results.replaceChildren(AmpPlayground.table("Memory by precision; the bars stack these parts from dark to light", heads, rows));
    status.textContent = found.map(({ name, bytes }) => {
      // A GPU has about as many GiB as it is sold with GB.
      const fitting = AmpGpus.find(({ gb }) => gb * 2 ** 30 * (1 - FREE) >= bytes.total);
      if (!fitting) return `${name}: ${gib(bytes.total)}, more than one GPU holds`;
      return `${name}: ${gib(bytes.total)}, which fits into ${fitting.gb} GB (${fitting.names.join(", ")})`;
    }).join("; ") + ".";
  }

  show();
});
