/* The playground of number formats: a number or its bits, in eight formats. */
"use strict";

AmpPlayground.register("number_formats", (box) => {
  const F = AmpFormats;
  const { el, svg, text, percent } = AmpPlayground;
  const state = { format: F.byKey("e4m3"), value: 0.1, mode: "nearest", draw: AmpPlayground.random(1) };
  const PARTS = ["sign", "exponent", "mantissa"];

  const input = el("input", {
    type: "text", value: "0.1", autocomplete: "off", spellcheck: "false", autocapitalize: "off",
    oninput: () => read(),
  });
  const problem = el("p", { class: "pg-problem", role: "status", "aria-live": "polite" });
  const status = AmpPlayground.status();
  const overview = el("div");
  const detail = el("div");

  const roundings = el("fieldset", { class: "pg-choice" }, el("legend", {}, "Rounding"));
  const roundingName = AmpPlayground.newId("rounding");
  for (const [mode, label] of [["nearest", "to nearest, ties to even"], ["stochastic", "stochastic"]]) {
    const attributes = { type: "radio", name: roundingName, value: mode, checked: mode === state.mode };
    const radio = el("input", { ...attributes, onchange: () => ((state.mode = mode), show()) });
    roundings.append(el("label", {}, radio, ` ${label}`));
  }
  const again = AmpPlayground.button("Draw again", () => show());
  roundings.append(again);

  const hint = "A number, inf, nan, 2^-10, or bits of the chosen format: 0x2e or 0b101110.";
  box.append(
    AmpPlayground.labelled("Your number", input, hint), problem, roundings, overview, status, detail,
  );

  /* Read the field; a number that cannot be read leaves what is shown as it was. */
  function read() {
    const result = F.parse(input.value, state.format);
    const failed = result.error !== undefined;
    problem.textContent = failed ? result.error : result.line;
    if (failed) input.setAttribute("aria-invalid", "true");
    else input.removeAttribute("aria-invalid");
    if (failed) return;
    state.value = result.pattern === undefined ? result.value : F.decode(state.format, result.pattern);
    state.pattern = result.pattern;
    show();
  }

  function rounded(format) {
    const exact = format === state.format && state.pattern !== undefined;
    if (exact) return { pattern: state.pattern, value: F.decode(format, state.pattern) };
    if (state.mode === "nearest") return F.roundNearest(format, state.value);
    return F.roundStochastic(format, state.value, state.draw());
  }

  function error(value, result) {
    if (!Number.isFinite(value) || !Number.isFinite(result)) return Object.is(value, result) ? "0 %" : "–";
    if (value === 0) return result === 0 ? "0 %" : "–";
    return percent(Math.abs((result - value) / value));
  }

  function bitText(format, pattern) {
    if (pattern === null) return "none";
    const all = F.bits(format, pattern);
    const ends = [0, format.sign, format.sign + format.exponent, format.width];
    const parts = PARTS.map((part, i) => el("span", { class: `pg-${part}` }, all.slice(ends[i], ends[i + 1])));
    return el("code", { class: "pg-bits" }, parts);
  }

  const formatName = AmpPlayground.newId("format");
  function show() {
    again.hidden = state.mode === "nearest";
    const results = new Map(F.FORMATS.map((format) => [format, rounded(format)]));
    const focused = document.activeElement?.name === formatName;
    const rows = F.FORMATS.map((format) => {
      const chosen = format === state.format;
      const result = results.get(format);
      const radio = el("input", {
        type: "radio", name: formatName, value: format.key, checked: chosen,
        onchange: () => ((state.format = format), (state.pattern = undefined), show()),
      });
      const note = F.remark(format, state.value, result);
      return {
        chosen,
        cells: [
          el("label", {}, radio, ` ${format.name}`), text(result.value), error(state.value, result.value),
          note, bitText(format, result.pattern),
        ],
      };
    });
    const caption = `${text(state.value)} in eight formats; choose a format for details`;
    const heads = ["format", "it becomes", "error", "remark", "bits"];
    overview.replaceChildren(AmpPlayground.table(caption, heads, rows));
    if (focused) overview.querySelector("input:checked").focus();
    const result = results.get(state.format);
    status.textContent = sentence(result);
    detail.replaceChildren(...details(result));
  }

  function sentence(result) {
    const { format, value } = state;
    const note = F.remark(format, value, result);
    const said = `In ${format.name}, ${text(value)} becomes ${text(result.value)}`;
    const how = error(value, result.value);
    const off = how === "0 %" ? ", exactly" : how === "–" ? "" : `, which is ${how} off`;
    return `${said}${off}${note ? ` (${note})` : ""}.`;
  }

  function details(result) {
    const { format, value } = state;
    if (result.pattern === null) return [el("p", {}, `${format.name} has no bit pattern for this value.`)];
    return [
      el("p", { class: "pg-title" }, `The bits of ${format.name}`),
      bitButtons(result.pattern), el("p", { class: "pg-formula" }, formula(result)),
      neighbours(result), chances(value),
    ].filter(Boolean);
  }

  /* One button for each bit; the arrow keys go from one to the next, so that all are one tab stop. */
  function bitButtons(pattern) {
    const { format } = state;
    const all = F.bits(format, pattern);
    const group = el("div", { class: "pg-flip", role: "group", "aria-label": `bits of ${format.name}` });
    const parts = [
      ...Array(format.sign).fill("sign"), ...Array(format.exponent).fill("exponent"),
      ...Array(format.mantissa).fill("mantissa"),
    ];
    const buttons = parts.map((part, i) => {
      const label = `${part} bit ${format.width - 1 - i}, is ${all[i]}`;
      const attributes = { type: "button", class: `pg-bit pg-${part}`, "aria-label": label };
      const pressed = { "aria-pressed": all[i] === "1" ? "true" : "false", tabindex: i ? -1 : 0 };
      return el("button", { ...attributes, ...pressed, onclick: () => flip(pattern, i) }, all[i]);
    });
    group.addEventListener("keydown", (event) => {
      const at = buttons.indexOf(document.activeElement);
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: buttons.length - 1 }[event.key];
      if (to === undefined || !buttons[to]) return;
      event.preventDefault();
      event.stopPropagation(); // the page turns over with these keys
      focusBit(buttons, to);
    });
    group.append(...buttons);
    return group;
  }

  function focusBit(buttons, to) {
    for (const [i, button] of buttons.entries()) button.tabIndex = i === to ? 0 : -1;
    buttons[to].focus();
  }

  function flip(pattern, i) {
    const { format } = state;
    const weight = 2 ** (format.width - 1 - i);
    const was = Math.floor(pattern / weight) % 2;
    state.pattern = was ? pattern - weight : pattern + weight;
    state.value = F.decode(format, state.pattern);
    input.value = `0x${state.pattern.toString(16)}`;
    input.removeAttribute("aria-invalid");
    problem.textContent = `These are the bits of ${format.name}.`;
    show();
    focusBit([...detail.querySelectorAll(".pg-bit")], i);
  }

  function formula({ pattern, value }) {
    const { format } = state;
    const { sign, exponent, mantissa } = F.fields(format, pattern);
    if (Number.isNaN(value)) return "This bit pattern is NaN.";
    if (!Number.isFinite(value)) return "All bits of the exponent are 1 and the mantissa is 0: infinity.";
    if (format.special === "scale") return `2^(${exponent} − ${format.bias}) = ${text(value)}`;
    const minus = sign ? "−1 × " : "";
    const fraction = mantissa / 2 ** format.mantissa;
    const base = `2^(${exponent || 1} − ${format.bias})`;
    const kind = exponent ? "" : " (subnormal: the leading 1 is a 0)";
    return `${minus}${base} × ${text((exponent ? 1 : 0) + fraction)} = ${text(value)}${kind}`;
  }

  function neighbours({ pattern, value }) {
    const { format } = state;
    const down = F.neighbour(format, pattern, -1);
    const up = F.neighbour(format, pattern, 1);
    if (Number.isNaN(value)) return null;
    const rows = [
      ["next below", down ? text(down.value) : "none"], ["this number", text(value)],
      ["next above", up ? text(up.value) : "none"],
      ["spacing here", Number.isFinite(value) ? text(F.spacing(format, pattern)) : "none"],
      ["largest finite", text(F.decode(format, format.last))],
      ["smallest above zero", text(smallest(format))],
    ].map((cells) => ({ cells }));
    const list = AmpPlayground.table(`${format.name} around this number`, ["what", "value"], rows);
    return el("div", { class: "pg-around" }, list, numberLine(pattern));
  }

  const smallest = (format) => F.decode(format, format.special === "scale" ? 0 : 1);

  /* Five numbers of the format as ticks, and where the one that was typed lies among them. */
  function numberLine(pattern) {
    const { format } = state;
    const around = [{ value: F.decode(format, pattern) }];
    for (const by of [-1, 1]) {
      let at = pattern;
      for (let i = 0; i < 2; i += 1) {
        const next = at === null ? null : F.neighbour(format, at, by);
        at = next && Number.isFinite(next.value) ? next.pattern : null;
        if (at !== null) around[by < 0 ? "unshift" : "push"](next);
      }
    }
    const values = around.map(({ value }) => value).filter(Number.isFinite);
    if (values.length < 2) return "";
    const [low, high] = [values[0], values[values.length - 1]];
    const x = (value) => 20 + (280 * (value - low)) / (high - low);
    const parts = values.flatMap((value) => [
      svg("line", { x1: x(value), x2: x(value), y1: 38, y2: 58, class: "pg-stroke" }),
    ]);
    const ends = [[low, "start", 2], [high, "end", 318]];
    for (const [value, anchor, at] of ends) {
      parts.push(svg("text", { x: at, y: 76, "text-anchor": anchor, class: "pg-text" }, text(value, 4)));
    }
    const { value } = state;
    if (value >= low && value <= high) {
      const points = `${x(value) - 6},22 ${x(value) + 6},22 ${x(value)},36`;
      parts.push(svg("polygon", { points, class: "pg-mark" }));
      const middle = Math.min(Math.max(x(value), 45), 275); // so that the whole number can be read
      parts.push(svg("text", { x: middle, y: 16, "text-anchor": "middle", class: "pg-text" }, text(value, 4)));
    }
    const line = svg("line", { x1: 5, x2: 315, y1: 48, y2: 48, class: "pg-stroke" });
    const label = `${values.length} neighbouring numbers of ${format.name}, and where ${text(value)} lies`;
    return svg("svg", { viewBox: "0 0 320 84", role: "img", "aria-label": label }, line, parts);
  }

  function chances(value) {
    if (state.mode === "nearest" || !Number.isFinite(value) || state.pattern !== undefined) return null;
    const { format } = state;
    const chance = F.chanceUp(format, value);
    const draws = 10000;
    let sum = 0;
    for (let i = 0; i < draws; i += 1) sum += F.roundStochastic(format, value, state.draw()).value;
    const mean = Number.isFinite(sum) ? ` The mean of ${draws.toLocaleString("en")} draws is ${text(sum / draws, 5)}.` : "";
    return el("p", {}, `It is rounded away from zero with a probability of ${percent(chance)}, otherwise towards zero.${mean}`);
  }

  show();
});
