/* The page of the search: sections by their words, the best of each page. */
"use strict";

(() => {
  const list = document.getElementById("search-results");
  const given = new URLSearchParams(location.search).get("q")?.trim() ?? "";
  for (const field of document.querySelectorAll('input[name="q"]')) field.value = given;
  if (!list || !given) return;
  const MOST = 20, DESCRIBED = 1.5;
  const index = lunr.Index.load(AmpSearchData.index);
  const terms = AmpExplain.termsOf(given, AmpReference.synonyms);
  const failures = new Map(AmpReference.failures.map((failure) => [failure.code, failure]));

  /** What the reference of failures knows comes first: a message that was pasted is recognised. */
  function fromReference() {
    const { codes, byMessage } = AmpExplain.explain(given, AmpReference, lunr.Index.load(AmpReference.index));
    if (!byMessage) return [];
    return codes.filter((code) => failures.has(code)).map((code) => {
      const { title, cause } = failures.get(code);
      return [`failures/${code}.html`, "", title, "", cause];
    });
  }

  const found = fromReference();
  const pages = new Set(found.map(([page]) => page));
  const results = AmpExplain.search(index, terms);
  const words = new Set(results.flatMap(({ matchData }) => Object.keys(matchData.metadata)));

  /** Whether the symptoms (the heading) or the search words have all words of the question, at least four. */
  function hasWholeQuestion({ matchData }) {
    const places = Object.values(matchData.metadata); // of each word, the fields that have it
    if (places.length < Math.max(4, words.size)) return false;
    return ["heading", "words"].some((field) => places.every((fields) => field in fields));
  }

  for (const result of results) if (hasWholeQuestion(result)) result.score *= 1.5;
  results.sort((a, b) => b.score - a.score);
  // A page counts by its best section, and two fifths of the next three; then the more, the more words of
  // the question stand in them. The power 0.5 was found with practice queries.
  const scores = new Map();
  for (const { ref, score, matchData } of results) {
    const section = AmpSearchData.sections[Number(ref)];
    let page = scores.get(section[0]);
    if (!page) {
      page = { section, score: 0, sections: 0, words: new Set() };
      scores.set(section[0], page);
    }
    if (page.sections === 4) continue;
    page.score += page.sections ? score * 0.4 : score;
    page.sections += 1;
    for (const word of Object.keys(matchData.metadata)) page.words.add(word);
  }
  /** More for the page of a failure of which facts stand together: see `amp_lab.failures.ranking`. */
  function described([page]) {
    const code = page.match(/^failures\/(AMP\d{4})/)?.[1];
    return code && AmpExplain.factsTogether(code, AmpExplain.stemsOf(terms), AmpReference) ? DESCRIBED : 1;
  }

  const rank = (page) => page.score * page.words.size ** 0.5 * described(page.section);
  for (const { section } of [...scores.values()].sort((a, b) => rank(b) - rank(a))) {
    if (!pages.has(section[0])) found.push(section);
  }

  const heading = document.createElement("p");
  heading.textContent = found.length ? `Best first, for “${given}”:` : `Nothing was found for “${given}”.`;
  list.append(heading);
  const items = document.createElement("ul");
  items.className = "search";
  for (const [page, anchor, title, name, text] of found.slice(0, MOST)) {
    const item = document.createElement("li");
    const link = document.createElement("a");
    link.href = page + (anchor ? `#${encodeURIComponent(anchor)}` : "");
    link.textContent = anchor ? `${title}: ${name}` : title;
    const excerpt = document.createElement("p");
    excerpt.textContent = text.replaceAll("`", "");
    item.append(link, excerpt);
    items.append(item);
  }
  list.append(items);
})();
