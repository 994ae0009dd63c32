/* The playground of the loss scale: a histogram, a slider, and the scaler step by step. */
"use strict";

AmpPlayground.register("loss_scale", (box) => {
  const F = AmpFormats;
  const { el, svg, text, percent, power } = AmpPlayground;
  const COUNT = 4000;
  const LOW = -48, HIGH = 24; // powers of two that are drawn
  const state = { format: F.byKey("fp16"), exponent: 0, centre: -24, interval: 10 };
  const normal = AmpScaler.gradients({
    count: COUNT, centre: 0, spread: 4, random: AmpPlayground.random(7),
  });
  const gradients = (centre) => normal.map((value) => value * 2 ** centre);

  const formats = ["fp16", "bf16", "e5m2", "e4m3"].map((key) => [key, F.byKey(key).name]);
  const scaled = (exponent) => `${power(exponent)} = ${(2 ** exponent).toLocaleString("en")}`;
  const scale = AmpPlayground.slider({
    min: 0, max: 32, value: 0, text: scaled, oninput: (value) => ((state.exponent = value), show()),
  });
  const centre = AmpPlayground.slider({
    min: -36, max: -4, value: state.centre, text: (value) => `around ${power(value)}`,
    oninput: (value) => ((state.centre = value), show()),
  });
  const chooser = AmpPlayground.select(formats, "fp16", (key) => ((state.format = F.byKey(key)), show()));
  const picture = el("div");
  const status = AmpPlayground.status();
  const field = (label, { input, said }) => {
    const whole = AmpPlayground.labelled(label, input);
    whole.append(said);
    return whole;
  };
  box.append(
    el("div", { class: "pg-row" }, AmpPlayground.labelled("Format of the gradients", chooser),
      field("Size of the gradients", centre)),
    field("Loss scale", scale), picture,
    el("p", { class: "pg-legend" }, "Filled blue: kept in full. Green: subnormal, with fewer bits. Outlined red: lost, as zero or infinity."),
    status,
  );

  function kind(exponent) {
    const value = 2 ** exponent * 1.4;
    const counts = AmpScaler.outcome([value], 1, state.format);
    return Object.keys(counts).find((name) => counts[name] === 1);
  }

  function show() {
    const values = gradients(state.centre);
    const bins = new Array(HIGH - LOW).fill(0);
    for (const value of values) {
      const exponent = Math.floor(Math.log2(Math.abs(value))) + state.exponent;
      if (exponent >= LOW && exponent < HIGH) bins[exponent - LOW] += 1;
    }
    const most = Math.max(...bins, 1);
    const width = 280 / bins.length;
    const parts = bins.map((count, i) => {
      const height = (112 * count) / most;
      const classes = { zero: "pg-bar-lost", overflow: "pg-bar-lost", subnormal: "pg-bar-subnormal", normal: "pg-bar" };
      const place = { x: 20 + i * width + 0.1 * width, y: 150 - height, width: 0.8 * width, height };
      return svg("rect", { ...place, class: classes[kind(LOW + i)] });
    });
    const format = state.format;
    const limits = [
      [Math.log2(F.decode(format, 1)), "smallest", 14], [1 - format.bias, "normal", 30],
      [Math.log2(F.decode(format, format.last)), "largest", 14],
    ];
    for (const [at, name, y] of limits) {
      if (at < LOW || at > HIGH) continue;
      const x = 20 + (at - LOW) * width;
      parts.push(svg("line", { x1: x, x2: x, y1: y + 3, y2: 150, class: "pg-guide" }));
      parts.push(svg("text", { x, y, "text-anchor": "middle", class: "pg-text" }, name));
    }
    for (let at = LOW; at <= HIGH; at += 12) {
      const x = 20 + (at - LOW) * width;
      parts.push(svg("text", { x, y: 166, "text-anchor": "middle", class: "pg-text" }, power(at)));
    }
    const counts = AmpScaler.outcome(values, 2 ** state.exponent, format);
    const said = describe(counts);
    const axis = svg("line", { x1: 20, x2: 300, y1: 150, y2: 150, class: "pg-stroke" });
    const label = `Histogram of gradients times the loss scale, against the range of ${format.name}. ${said}`;
    picture.replaceChildren(svg("svg", { viewBox: "0 0 320 172", role: "img", "aria-label": label }, parts, axis));
    status.textContent = said;
  }

  function describe(counts) {
    const share = (name) => percent(counts[name] / COUNT);
    const verdict = counts.overflow
      ? "Gradients overflow, so the step would be skipped: lower the scale."
      : counts.zero > COUNT / 100
        ? "Many become zero: raise the scale."
        : "This scale works.";
    return `At a scale of ${(2 ** state.exponent).toLocaleString("en")}, ${share("zero")} of the gradients are zero in ${state.format.name}, ${share("subnormal")} subnormal, ${share("overflow")} infinite. ${verdict}`;
  }

  /* The scaler, on gradients that shrink as training goes on, with a burst now and then. */
  const run = { scaler: null, steps: [], random: null };
  const history = el("div");
  const said = AmpPlayground.status();
  const interval = el("input", { type: "number", min: 1, max: 2000, value: state.interval });
  const problem = el("p", { class: "pg-problem", role: "status", "aria-live": "polite" });
  interval.addEventListener("input", () => {
    const value = Number(interval.value);
    const fine = interval.value !== "" && Number.isInteger(value) && value >= 1 && value <= 2000;
    problem.textContent = fine ? "" : "The interval must be a whole number from 1 to 2000.";
    if (!fine) return interval.setAttribute("aria-invalid", "true");
    interval.removeAttribute("aria-invalid");
    state.interval = value;
    return reset();
  });
  const steps = (count) => AmpPlayground.button(count === 1 ? "One step" : `${count} steps`, () => advance(count));
  box.append(
    el("p", { class: "pg-title" }, "The dynamic scaler"),
    AmpPlayground.labelled("Good steps before the scale doubles", interval, "GradScaler's default is 2000. With 10 you see more changes."),
    problem, steps(1), steps(10), steps(100), AmpPlayground.button("Start over", () => reset()), history, said,
  );

  function reset() {
    run.scaler = new AmpScaler.Scaler({ scale: 2 ** 16, interval: state.interval });
    run.steps = [];
    run.random = AmpPlayground.random(3);
    drawHistory();
  }

  function advance(count) {
    for (let i = 0; i < count; i += 1) {
      const step = run.steps.length;
      const burst = run.random() < 0.03 ? 6 : 0;
      const centre = state.centre + 4 - step / 60 + burst + 1.5 * (run.random() - 0.5);
      const largest = 2 ** (centre + 16); // four sigma out, as the largest of 4000 is
      const used = run.scaler.scale;
      const result = F.roundNearest(state.format, largest * used);
      const over = !Number.isFinite(result.value) || largest * used > 2 * F.decode(state.format, state.format.last);
      const skipped = run.scaler.update(over);
      run.steps.push({ used, skipped });
    }
    run.steps = run.steps.slice(-2000);
    drawHistory();
  }

  function drawHistory() {
    const shown = run.steps.slice(-200);
    const from = run.steps.length - shown.length;
    const x = (i) => 40 + (270 * i) / Math.max(shown.length - 1, 1);
    const exponents = shown.map(({ used }) => Math.log2(used));
    const low = Math.min(...exponents, 15) - 1, high = Math.max(...exponents, 17) + 1;
    const y = (value) => 120 - (105 * (value - low)) / (high - low);
    const points = exponents.map((value, i) => `${x(i)},${y(value)}`).join(" ");
    const marks = shown.flatMap(({ skipped }, i) =>
      skipped ? [svg("path", { d: `M${x(i) - 4},${y(exponents[i]) - 4}l8,8m-8,0l8,-8`, class: "pg-bar-lost" })] : []);
    const labels = [low + 1, high - 1].map((value) =>
      svg("text", { x: 34, y: y(value) + 4, "text-anchor": "end", class: "pg-text" }, power(Math.round(value))));
    const skips = run.steps.filter(({ skipped }) => skipped).length;
    const last = run.steps[run.steps.length - 1];
    const now = run.scaler.scale.toLocaleString("en");
    const what = !last
      ? `The scale begins at ${now}. Take a step.`
      : last.skipped
        ? `Step ${run.steps.length}: a gradient overflowed, so the step was skipped and the scale halved to ${now}.`
        : `Step ${run.steps.length}: the scale is ${now}, with ${run.scaler.good} good steps in a row. ${skips} steps were skipped in total.`;
    const label = `The scale over steps ${from + 1} to ${run.steps.length}, ${skips} of them skipped (crosses)`;
    const line = svg("polyline", { points, class: "pg-stroke" });
    const drawing = svg("svg", { viewBox: "0 0 320 130", role: "img", "aria-label": label }, labels, line, marks);
    history.replaceChildren(...(shown.length ? [drawing] : []));
    said.textContent = what;
  }

  show();
  reset();
});
