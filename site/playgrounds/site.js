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

// A summary is fetched from the page that was found, which a browser refuses for file://.
if (location.protocol === "file:" && typeof DOCUMENTATION_OPTIONS !== "undefined") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// A page that was found opens where the words stand, as a message that was pasted does.
document.getElementById("search-results")?.addEventListener("click", (event) => {
  const link = event.target.closest("a");
  const words = new URLSearchParams(location.search).get("q")?.trim();
  if (link && words && !link.hash) link.href += `#:~:text=${encodeURIComponent(words).replaceAll("-", "%2D")}`;
});
