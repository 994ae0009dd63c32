/* The playground of block scaling: what each way of scaling keeps of a row of values. */
"use strict";

AmpPlayground.register("block_scaling", (box) => {
  const { el, svg, text, percent, power } = AmpPlayground;
  const COLUMNS = 64;
  const OUTLIER = 20;
  const state = { preset: "outlier", size: 8, row: null };

  /* Four rows, like neurons of a layer; the first is the one that is drawn. */
  function rows() {
    const random = AmpPlayground.random(11);
    const normal = () => Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());
    const made = Array.from({ length: 4 }, () => Array.from({ length: COLUMNS }, () => Math.fround(normal())));
    const factor = 2 ** state.size;
    if (state.preset === "outlier") made[0][OUTLIER] = Math.fround(factor);
    if (state.preset === "other") made[1] = made[1].map((value) => Math.fround(value * factor));
    if (state.preset === "decay") made[0] = made[0].map((value, i) => Math.fround(value * 2 ** ((-state.size * i) / COLUMNS)));
    if (state.preset === "typed") return [state.row];
    return made;
  }

  const presets = [
    ["normal", "normally distributed"], ["outlier", "one outlier in the row"],
    ["other", "another row is large"], ["decay", "shrinking along the row"], ["typed", "my own"],
  ];
  const chooser = AmpPlayground.select(presets, state.preset, (preset) => {
    state.preset = preset;
    own.hidden = preset !== "typed";
    if (preset === "typed") read();
    else ((problem.textContent = ""), show());
  });
  const size = AmpPlayground.slider({
    min: 0, max: 16, value: state.size, text: (value) => `${power(value)} = ${(2 ** value).toLocaleString("en")}`,
    oninput: (value) => ((state.size = value), state.preset === "typed" || show()),
  });
  const typed = el("textarea", { spellcheck: "false", oninput: () => read() });
  typed.value = "0.5, -1.2, 3, 0.01, 100, -0.2, 0.7, 0.003";
  const own = AmpPlayground.labelled("Your values", typed, "Up to 256 numbers, separated by commas or spaces.");
  own.hidden = true;
  const problem = el("p", { class: "pg-problem", role: "status", "aria-live": "polite" });
  const results = el("div");
  const status = AmpPlayground.status();
  const sized = AmpPlayground.labelled("Factor", size.input);
  sized.append(size.said);
  box.append(
    el("div", { class: "pg-row" }, AmpPlayground.labelled("Values", chooser), sized), own, problem, results,
    el("p", { class: "pg-legend" }, "The outline is the original value (logarithmic). The filled part is the quantised value. Red values became zero. The signal-to-noise ratio leaves out the outlier."),
    status,
  );

  function read() {
    const { values, error } = AmpBlocks.parse(typed.value);
    problem.textContent = error ?? "";
    if (error) return typed.setAttribute("aria-invalid", "true");
    typed.removeAttribute("aria-invalid");
    state.row = values;
    return show();
  }

  function strip(before, after, label) {
    const low = -14;
    const most = Math.max(...before.map(Math.abs), 2 ** low * 2);
    const top = Math.log2(most);
    const height = (value) => (value === 0 ? 0 : Math.max(2, (40 * (Math.log2(Math.abs(value)) - low)) / (top - low)));
    const width = 320 / before.length;
    const parts = before.flatMap((value, i) => {
      const place = { x: i * width + 0.1 * width, width: 0.8 * width };
      const lost = value !== 0 && after[i] === 0;
      const outline = { ...place, y: 42 - height(value), height: height(value) };
      const kept = { ...place, y: 42 - height(after[i]), height: height(after[i]) };
      return lost
        ? [svg("rect", { ...outline, class: "pg-bar-lost" })]
        : [svg("rect", { ...kept, class: "pg-bar" }), svg("rect", { ...outline, class: "pg-outline" })];
    });
    return svg("svg", { viewBox: "0 0 320 44", role: "img", "aria-label": label }, parts);
  }

  const decibels = (value) => (value === Infinity ? "exact" : Number.isNaN(value) ? "–" : `${value.toFixed(1)} dB`);

  /* Which schemes keep the most, of those whose values have so many bits. */
  function best(compared, width) {
    const same = compared.filter(({ scheme }) => scheme.format.width === width);
    const most = decibels(Math.max(...same.map(({ sqnr }) => sqnr)));
    const names = same.filter(({ sqnr }) => decibels(sqnr) === most).map(({ scheme }) => scheme.name);
    return `${names.join(" and ")} ${names.length > 1 ? "keep" : "keeps"} the most (${most})`;
  }

  function show() {
    const all = rows();
    const before = all[0];
    const outlier = state.preset === "outlier" ? OUTLIER : -1;
    const compared = AmpBlocks.SCHEMES.map((scheme) => {
      const { rows: made, bits } = AmpBlocks.apply(scheme, all);
      return { scheme, bits, after: made[0], ...AmpBlocks.loss(before, made[0], outlier) };
    });
    const lines = compared.map(({ scheme, bits, sqnr, zeros }) => ({
      cells: [scheme.name, text(bits, 3), decibels(sqnr), percent(zeros)],
    }));
    const heads = ["one scale", "bits per value", "signal to noise", "became zero"];
    const strips = compared.map(({ scheme, zeros, after }) => {
      const said = `${scheme.name}: ${percent(zeros)} became zero`;
      return AmpPlayground.figure(said, strip(before, after, `The row. ${said}`));
    });
    results.replaceChildren(AmpPlayground.table(`A row of ${before.length} values in five schemes`, heads, lines), ...strips);
    const worst = compared.reduce((a, b) => (b.zeros > a.zeros ? b : a));
    const most = worst.zeros ? ` ${worst.scheme.name}: ${percent(worst.zeros)} became zero, the most.` : "";
    status.textContent = `With 8 bits: ${best(compared, 8)}. With 4 bits: ${best(compared, 4)}.${most}`;
  }

  show();
});
