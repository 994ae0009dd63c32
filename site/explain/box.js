/* The box "Paste your message": it shows what AmpExplain finds. */
"use strict";

(() => {
  const box = document.querySelector(".explain");
  if (!box) return;
  const index = lunr.Index.load(AmpReference.index);
  const failures = new Map(AmpReference.failures.map((failure) => [failure.code, failure]));
  const pages = new Map(AmpReference.pages.map((page) => [page.page, page]));
  const up = "../".repeat(Number(box.dataset.depth));

  function element(tag, text, parent, name) {
    const made = document.createElement(tag);
    if (text) made.textContent = text;
    if (name) made.className = name;
    parent?.append(made);
    return made;
  }

  function link(text, to, parent) {
    const made = element("a", text, parent);
    made.href = to;
    return made;
  }

  /** Adds text in which backquotes surround code. */
  function addText(text, parent) {
    text.split("`").forEach((part, number) => {
      if (number % 2) element("code", part, parent, "literal");
      else parent.append(part);
    });
  }

  const toFailure = (code) => `${up}failures/${code}.html`;
  const toPage = (page) => up + (page === "README.md" ? "index.html" : page.replace(/\.(ipynb|md)$/, ".html"));

  box.replaceChildren();
  const label = element("label", "Paste your message, your log, or describe what you see", box);
  const field = element("textarea", "", label);
  field.rows = 5;
  field.spellcheck = false;
  field.placeholder = "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and Half";
  const answer = element("div", "", box, "explain-answer");
  answer.setAttribute("role", "status");

  function showFailure(code, ownLine) {
    const failure = failures.get(code);
    const title = element("p", "", answer, "explain-title");
    link(failure.title, toFailure(code), title);
    element("span", ` ${code}`, title);
    const place = ownLine && `${ownLine.file}:${ownLine.line}${ownLine.code ? `  ${ownLine.code}` : ""}`;
    const rows = [["Why", failure.cause], ["The fix", failure.cure], ["Not this", failure.unsafe], ["Versions", failure.torch], ["Your line", place]];
    const list = element("dl", "", answer);
    for (const [name, text] of rows) {
      if (!text) continue;
      element("dt", name, list);
      addText(text, element("dd", "", list));
    }
  }

  function show() {
    answer.replaceChildren();
    if (!field.value.trim()) return;
    const { codes, nearest, ownLine } = AmpExplain.explain(field.value, AmpReference, index);
    if (codes.length) {
      showFailure(codes[0], ownLine);
      if (codes.length > 1) {
        element("p", "It may also be:", answer);
        const list = element("ul", "", answer);
        for (const code of codes.slice(1)) link(failures.get(code).title, toFailure(code), element("li", "", list));
      }
      return;
    }
    element("p", "Unknown: no entry of this reference fits." + (nearest.length ? " Nearest by words:" : ""), answer);
    const list = element("ul", "", answer);
    for (const ref of nearest) {
      const failure = failures.get(ref);
      link(failure ? failure.title : pages.get(ref).title, failure ? toFailure(ref) : toPage(ref), element("li", "", list));
    }
  }

  let waiting = 0;
  field.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(show, 150);
  });
})();
