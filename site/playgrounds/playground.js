/* What the playgrounds share: elements, drawings, and random numbers that can be repeated. */
"use strict";

const AmpPlayground = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const builders = new Map();
  let count = 0;

  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value !== null) element.setAttribute(name, value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== ""));
    return element;
  }

  /** An HTML element; attributes that begin with `on` are listeners. */
  const el = (tag, attributes = {}, ...children) =>
    fill(document.createElement(tag), attributes, children);

  const svg = (tag, attributes = {}, ...children) =>
    fill(document.createElementNS(SVG, tag), attributes, children);

  /** A drawing with a line above it. It is drawn for 320 pixels: that is what a phone has. */
  const figure = (caption, drawing) =>
    el("figure", { class: "pg-figure" }, el("figcaption", {}, caption), drawing);

  const newId = (name) => `playground-${name}-${(count += 1)}`;

  /** A label with its control below it. */
  function labelled(text, control, hint = "") {
    const id = newId("field");
    control.id = id;
    const parts = [el("label", { for: id }, text), control];
    if (hint) {
      control.setAttribute("aria-describedby", `${id}-hint`);
      parts.push(el("small", { id: `${id}-hint` }, hint));
    }
    return el("div", { class: "pg-field" }, parts);
  }

  const select = (options, chosen, onchange) =>
    el(
      "select",
      { onchange: (event) => onchange(event.target.value) },
      options.map(([value, text]) => el("option", { value, selected: value === chosen }, text)),
    );

  /** A slider that says its value in words. */
  function slider({ min, max, step = 1, value, text, oninput }) {
    const said = el("output", {}, text(value));
    const input = el("input", { type: "range", min, max, step, value, "aria-valuetext": text(value) });
    input.addEventListener("input", () => {
      const now = Number(input.value);
      said.textContent = text(now);
      input.setAttribute("aria-valuetext", text(now));
      oninput(now);
    });
    return { input, said };
  }

  const button = (text, onclick) => el("button", { type: "button", class: "pg-button", onclick }, text);

  /** A line that a screen reader says when it changes. */
  const status = () => el("p", { class: "pg-status", role: "status", "aria-live": "polite" });

  /** A table: a caption, the heads of its columns, and rows whose first cell is their head. */
  function table(caption, heads, rows) {
    const head = el("tr", {}, heads.map((text) => el("th", { scope: "col" }, text)));
    const body = rows.map(({ cells, chosen = false }) => {
      const [first, ...rest] = cells;
      const attributes = chosen ? { class: "pg-chosen" } : {};
      const others = rest.map((cell) => el("td", {}, cell));
      return el("tr", attributes, el("th", { scope: "row" }, first), others);
    });
    const whole = el("table", {}, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, body));
    const box = { class: "pg-table", tabindex: 0, role: "region", "aria-label": caption };
    return el("div", box, whole);
  }

  /** Random numbers from [0, 1) that are the same for a seed (mulberry32). */
  function random(seed) {
    let state = seed >>> 0;
    return () => {
      state = (state + 0x6d2b79f5) >>> 0;
      let t = state;
      t = Math.imul(t ^ (t >>> 15), t | 1);
      t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
  }

  /** A number as people write it; short, and with an exponent where it is far from 1. */
  function text(value, digits = 17) {
    if (!Number.isFinite(value)) return String(value).replace("Infinity", "inf");
    if (Object.is(value, -0)) return "-0";
    const short = digits < 17 ? Number(value.toPrecision(digits)) : value;
    const magnitude = Math.abs(short);
    if (magnitude === 0 || (magnitude >= 1e-4 && magnitude < 1e16)) return String(short);
    return short.toExponential();
  }

  const percent = (share) => {
    if (share === 0) return "0 %";
    if (share < 1e-4) return `${text(100 * share, 2)} %`;
    return `${Number((100 * share).toPrecision(3))} %`;
  };

  const SUPER = "⁰¹²³⁴⁵⁶⁷⁸⁹";
  /** 2 to a power, as people write it. */
  const power = (exponent) =>
    `2${String(exponent).replace("-", "⁻").replace(/\d/g, (digit) => SUPER[digit])}`;

  function build() {
    for (const place of document.querySelectorAll("[data-playground]")) {
      const builder = builders.get(place.dataset.playground);
      if (!builder) continue;
      const box = el("div", { class: "pg" });
      builder(box);
      place.replaceChildren(box); // what stood there is for those without JavaScript
      place.dataset.ready = "";
    }
  }

  document.addEventListener("DOMContentLoaded", build);
  return {
    register: (name, builder) => builders.set(name, builder),
    el, svg, figure, labelled, select, slider, button, status, table, random, text, percent, power, newId,
  };
})();
