/* What every page has. */
"use strict";

// Code that is wider than the page can be scrolled by keyboard too.

(() => {
  function mark() {
    for (const box of document.querySelectorAll("pre, .table-wrapper")) {
      if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
      else box.removeAttribute("tabindex");
    }
  }
  mark();
  window.addEventListener("resize", mark);
})();
