/* The playground of memory: what a training step keeps, in stacked bars. */
"use strict";

AmpPlayground.register("memory", (box) => {
  const M = AmpMemory;
  const { el, svg } = AmpPlayground;
  const FREE = 0.1; // the share of the memory that is left to the driver and to fragmentation
  const PARTS = ["weights", "casts", "gradients", "optimizer", "activations"];
  const NAMES = ["weights", "weights cast by autocast", "gradients", "optimizer state", "activations"];
  const SHADES = [1, 0.8, 0.55, 0.35, 0.15];
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
      choice("Sharding", "sharding", M.SHARDINGS),
      number("Processes", "processes", "8", "One for each GPU.", { least: 1, whole: true })),
    el("div", { class: "pg-row" },
      number("Batch of each process", "batch", "1", "", { least: 1, whole: true }),
      number("Activations of one sample, in MiB", "activations", "0",
        "The command amp-lab memory forecasts them for your model.", { factor: 2 ** 20 })),
    problem, results, status,
  );

  const gib = (bytes) => `${Number((bytes / 2 ** 30).toPrecision(3)).toLocaleString("en")} GiB`;

  const shaded = (i, place) =>
    svg("rect", { ...place, class: "pg-bar", "fill-opacity": SHADES[i], stroke: "currentColor", "stroke-width": 0.5 });

  /* The name of a part, with the shade that it has in the bars. */
  const named = (i) =>
    el("span", { class: "pg-part" },
      svg("svg", { viewBox: "0 0 12 12", class: "pg-swatch", "aria-hidden": "true" }, shaded(i, { x: 0.5, y: 0.5, width: 11, height: 11 })),
      NAMES[i]);

  function bar(found, most, name) {
    let x = 0;
    const parts = PARTS.map((part, i) => {
      const width = (320 * found[part]) / most;
      x += width;
      return shaded(i, { x: x - width, y: 1, width, height: 22 });
    });
    return svg("svg", { viewBox: "0 0 320 24", role: "img", "aria-label": `${name}: ${gib(found.total)}` }, parts);
  }

  function show() {
    const found = M.PRECISIONS.map((precision) => ({ ...precision, bytes: M.parts({ ...state, precision: precision.key }) }));
    const most = Math.max(...found.map(({ bytes }) => bytes.total));
    const rows = PARTS.map((part, i) => ({ cells: [named(i), ...found.map(({ bytes }) => gib(bytes[part]))] }));
    rows.push({ chosen: true, cells: ["together", ...found.map(({ bytes }) => gib(bytes.total))] });
    const heads = ["memory of each process", ...found.map(({ name }) => name)];
    const bars = found.map(({ bytes, name }) => AmpPlayground.figure(`${name}: ${gib(bytes.total)}`, bar(bytes, most, name)));
    results.replaceChildren(AmpPlayground.table("Memory by precision", heads, rows), ...bars);
    status.textContent = found.map(({ name, bytes }) => {
      // A GPU has about as many GiB as it is sold with GB.
      const fitting = AmpGpus.find(({ gb }) => gb * 2 ** 30 * (1 - FREE) >= bytes.total);
      if (!fitting) return `${name}: ${gib(bytes.total)}, more than any single GPU has`;
      return `${name}: ${gib(bytes.total)}, which fits into ${fitting.gb} GB (${fitting.names.join(", ")})`;
    }).join("; ") + ".";
  }

  show();
});
