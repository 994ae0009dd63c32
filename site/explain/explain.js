/* Finds the failure that a message, a log or a description is about: what `amp_lab.failures` does, with
   the same data. A test compares the answers of both. */
"use strict";

const AmpExplain = (() => {
  const MOST = 3, MAX_CHARACTERS = 1e6, LONGEST_QUESTION = 3000, LONGEST_MESSAGE = 400, LONGEST_CONTEXT = 6000, NUMBERS_OF_A_LOG = 4;
  const FACTS_OF_A_WINNER = 3, WORDS_OF_A_WINNER = 6, SHARE_OF_A_WINNER = 0.4, SHARE_OF_A_PRINTED_ERROR = 0.75, LONGEST_PHRASE = 3;
  const WORDS_OF_A_LONG_TEXT = 24, SHARE_OF_A_LONG_TEXT = 0.33, OPTIONS_OF_A_COMMAND = 4, LINES_OF_A_LOG = 2;
  const COVERAGE = 0.3, NOT_NAMED = 0.75, DESCRIBED = 1.5, THREE_FACTS = 1.75, CONTRADICTED = 0.7;
  const ERROR = /(?<![A-Za-z_.])[A-Za-z_.]*(?:Error|Exception)\b ?:/g;
  const PRINTED = /(?<![A-Za-z_.])(?<!raise )[A-Za-z_.]*(?:Error|Exception|Warning|Unsupported)\b ?[:(]|\[E(?:\d{4})? /g;
  const LOG_LINE = /\b(?:INFO|WARNING|ERROR|DEBUG)\b|\[[IWE]\]|\b\d\d:\d\d:\d\d/g;
  const OPTION = /(?<!\S)--?[a-zA-Z][\w-]*(?:[= ](?!-)\S+)?/g; // such as "--epochs 3"
  const LOGGED_NUMBER = /[\w/]+ ?[:=] ?-?\d[\w.:+-]*,?/g; // such as "lr: 1.0e-03" in a log
  const CODE = /(?<![A-Za-z0-9_])AMP[0-9]{4}(?![A-Za-z0-9_])/gi;
  const FINAL_Y = /([aeiou]|^[^aeiouwy]{2,})y(?:s|ed|ing)?$/;
  const CONTRACTION = /(?:n['’]t|['’](?:s|re|ve|ll|d|m))(?![a-z0-9_])/g;
  const MEASURED = /(?<![\w.])0\.\d*[1-9]\d*(?!\w)/g; // such as 0.465; 0.0 is a word
  const EXCLAMATION = /!{4,}/g; // what a model of NaN prints
  const PREFIX = /^\s*(?:[\w.]*(?:Error|Exception|Warning)\b:?\s*)+/;
  const FRAME = new RegExp(
    '^[ \\t│]*File "([^"\\n]+)", line (\\d+)(?:, in ([^\\n]+))?(?:\\n([^\\n]*))?' +
    '|^[ \\t│]*(?:File )?(Cell In\\[\\d+\\]|[^\\s:"]+\\.py)(?:, line |:)(\\d+)', "gm");
  const LIBRARY = /site-packages|dist-packages|[\\/]lib[\\/]python\d|<frozen|<string>|<eval/;

  /** The text on one line, without colours, frames of tables, and the marks of ranks. */
  function flat(text) {
    return text
      .replace(/\x1b\[[0-9;?]*[A-Za-z]/g, " ")
      .replace(/^[ \t]*\[(?:rank)?\d+\]:/gm, " ")
      .replace(/[│╭╮╰╯─❱┃]/g, " ")
      .replace(/\s+/g, " ")
      .trim();
  }

  /** The words of a text as the index has them, without the names of exceptions before it. */
  function termsOf(text, synonyms) {
    const line = flat(text).replace(PREFIX, "").toLowerCase().replace(CONTRACTION, " ").replace(MEASURED, " ");
    const words = line.replace(EXCLAMATION, " garbage ").match(/[a-z0-9]+/g) ?? [];
    const terms = [];
    for (let start = 0, length; start < words.length; start += length) {
      length = LONGEST_PHRASE;
      const phrase = () => words.slice(start, start + length).join(" ");
      while (length > 1 && !Object.hasOwn(synonyms, phrase())) length -= 1;
      // lunr's stemmers in Python and JavaScript treat a final "y" differently.
      terms.push((Object.hasOwn(synonyms, phrase()) ? synonyms[phrase()] : phrase()).replace(FINAL_Y, "$1i"));
    }
    return terms;
  }

  /** The terms of a text that the index can find, each once: without words such as "the". */
  function wordsToSearch(text, synonyms) {
    return [...new Set(termsOf(text, synonyms))].filter((term) => lunr.stopWordFilter(term));
  }

  /** Where a pattern matches: the start and the end of each place. */
  function placesOf(pattern, line) {
    const found = [...line.matchAll(new RegExp(pattern.regex, "gi"))];
    return found.map((match) => [match.index, match.index + match[0].length]);
  }

  function hasSubject(line, reference) {
    const words = new Set(termsOf(line, reference.synonyms));
    return reference.subject_words.some((word) => words.has(word));
  }

  /** Whether the text has a message that is not about precision. */
  function isOther(line, reference) {
    const lower = line.toLowerCase();
    return reference.other_subjects.some((message) => lower.includes(message));
  }

  /** The codes of failures that stand in the text, in the order of the text, each once. */
  function byCode(line, reference) {
    const known = new Set(reference.failures.map(({ code }) => code));
    const codes = (line.match(CODE) ?? []).map((code) => code.toUpperCase());
    return [...new Set(codes)].filter((code) => known.has(code));
  }

  function byMessage(line, reference) {
    const lower = line.toLowerCase();
    const essential = lower.replace(/\bthe |[,:;](?= |$)/g, "");
    const errors = [...line.matchAll(ERROR)].map((found) => [found.index, found.index + found[0].length]);
    const [lastError, endOfName] = errors.at(-1) ?? [0, -2];
    const startOfMessage = endOfName + 1;
    // If the last error is about another subject, warnings before the first error do not count.
    const begin = errors.length && isOther(line.slice(lastError), reference) ? errors[0][0] : 0;
    const matches = [], decided = new Set();
    for (const pattern of reference.patterns) {
      if (!lower.includes(pattern.fragment)) continue;
      if (pattern.general && !hasSubject(line, reference) && !byClues(pattern.code, lower, reference).length) continue;
      const places = placesOf(pattern, line);
      if (!places.length || places.at(-1)[1] <= begin) continue;
      const isInLastError = places.at(-1)[1] > lastError;
      const isItsStart = places.some(([start, end]) => start <= startOfMessage && startOfMessage < end);
      const isExact = pattern.exact !== "" && essential.includes(pattern.exact);
      matches.push([pattern, (isInLastError ? 1e8 : 0) + (isItsStart ? 1e6 : 0), isExact]);
      if (isExact) decided.add(pattern.regex);
    }
    // Messages that differ in their dtypes alone: only the one with the dtypes of the text counts.
    const best = new Map();
    for (const [pattern, place, isExact] of matches) {
      if (!isExact && decided.has(pattern.regex)) continue;
      const rank = place + pattern.literal + (isExact ? 10 : 0);
      best.set(pattern.code, Math.max(rank, best.get(pattern.code) ?? 0));
    }
    const codes = [...best.keys()].sort((a, b) => best.get(b) - best.get(a) || (a < b ? -1 : 1));
    return codes.length ? [...new Set([...byClues(codes[0], lower, reference), ...codes])] : [];
  }

  /** The failures to which the rest of the text points, if the message of `first` has many causes. */
  function byClues(first, lower, reference) {
    const context = lower.slice(-LONGEST_CONTEXT);
    if (reference.one_cause.some((message) => context.includes(message))) return [];
    const lengths = new Map();
    for (const [code, clues] of Object.entries(reference.clues[first] ?? {})) {
      const standing = clues.filter((clue) => clue.split(" ").every((part) => context.includes(part)));
      if (standing.length) lengths.set(code, Math.max(...standing.map((clue) => clue.length)));
    }
    return [...lengths.keys()].sort((a, b) => lengths.get(b) - lengths.get(a) || (a < b ? -1 : 1));
  }

  /** The results of a search for words, best first; those of equal score by their key. */
  function search(index, terms) {
    const results = terms.length ? index.search(terms.join(" ")) : [];
    const rounded = ({ score }) => Math.round(score * 1e4);
    return results.sort((a, b) => rounded(b) - rounded(a) || (a.ref < b.ref ? -1 : 1));
  }

  /** What is searched for by its words: the last error or warning, or the whole of a short text. */
  function questionOf(line) {
    const printed = [...line.matchAll(PRINTED)];
    if (printed.length) return line.slice(printed.at(-1).index).slice(0, LONGEST_MESSAGE);
    if (line.length > LONGEST_QUESTION) return "";
    if ((line.match(OPTION) ?? []).length >= OPTIONS_OF_A_COMMAND) line = line.replace(OPTION, " ");
    const isLog = (line.match(LOGGED_NUMBER) ?? []).length >= NUMBERS_OF_A_LOG;
    return isLog ? line.replace(LOGGED_NUMBER, " ") : line;
  }

  /** The stems of terms: "drops" and "dropped" have the stem "drop". */
  function stemsOf(terms) {
    return new Set([...terms].map((term) => lunr.stemmer(new lunr.Token(term)).toString()));
  }

  const isAbsent = (words) => words[0] === "!"; // the text must have none of the words after it

  /** The lists of facts that stand in the text. */
  function standing(lists, stems) {
    const stands = (words) => words.some((word) => stems.has(word)) !== isAbsent(words);
    return (lists ?? []).filter((facts) => facts.every(stands));
  }

  /** How many facts that point to the failure stand together; 0 if no list is complete. */
  function factsTogether(code, stems, reference) {
    const together = standing(reference.described[code], stems);
    return Math.max(0, ...together.map((facts) => facts.filter((words) => !isAbsent(words)).length));
  }

  /** The results for a description, best first: see `amp_lab.failures.ranking`. */
  function ranked(question, results, reference) {
    const terms = new Set(termsOf(question, reference.synonyms));
    const shared = new Set(results.flatMap(({ matchData }) => Object.keys(matchData.metadata)));
    const named = Object.values(reference.named).filter(({ words }) => words.some((word) => terms.has(word)));
    const stems = stemsOf(terms), scores = new Map();
    for (const { ref, score, matchData } of results) {
      let own = score * (Object.keys(matchData.metadata).length / shared.size) ** COVERAGE;
      for (const { codes } of named) if (!codes.includes(ref)) own *= NOT_NAMED;
      const facts = factsTogether(ref, stems, reference);
      if (facts > 0) own *= facts > 2 ? THREE_FACTS : DESCRIBED;
      if (standing(reference.contradicted[ref], stems).length) own *= CONTRADICTED;
      scores.set(ref, Math.round(own * 1e4));
    }
    return [...results].sort((a, b) => scores.get(b.ref) - scores.get(a.ref) || (a.ref < b.ref ? -1 : 1));
  }

  function isAboutPrecision(question, failures, reference) {
    const terms = termsOf(question, reference.synonyms);
    const namesSubject = reference.subject_words.some((word) => terms.includes(word));
    const hasAlarm = reference.alarms.some((word) => terms.includes(word));
    const words = wordsToSearch(question, reference.synonyms).length;
    const [best] = failures;
    const common = Object.keys(best.matchData.metadata).length;
    const hasMessage = question.search(PRINTED) >= 0 || isOther(question, reference);
    const isLog = (question.match(LOG_LINE) ?? []).length >= LINES_OF_A_LOG;
    if (hasMessage || (isLog && !hasAlarm)) return namesSubject && common >= SHARE_OF_A_PRINTED_ERROR * words;
    if (hasAlarm) return true;
    const facts = factsTogether(best.ref, stemsOf(terms), reference);
    const isLong = words >= WORDS_OF_A_LONG_TEXT;
    if (namesSubject) return facts > 0 || !isLong || common >= SHARE_OF_A_LONG_TEXT * words;
    if (facts >= FACTS_OF_A_WINNER) return true;
    return facts > 0 && common >= Math.max(WORDS_OF_A_WINNER, SHARE_OF_A_WINNER * words);
  }

  /** The last frame of a traceback that is in no library, or null. */
  function lastOwnLine(text) {
    let last = null;
    for (const [, file, line, name, code, cell, number] of text.matchAll(FRAME)) {
      if (LIBRARY.test(file ?? cell)) continue;
      last = { file: file ?? cell, line: Number(line ?? number), name: (name ?? "").trim(), code: (code ?? "").trim() };
    }
    return last;
  }

  /** What is known of a text: `{codes, nearest, ownLine, byMessage}`; no codes if it is unknown. */
  function explain(given, reference, index) {
    const text = given.slice(-MAX_CHARACTERS);
    const ownLine = lastOwnLine(text);
    const line = flat(text);
    const found = [...new Set([...byCode(line, reference), ...byMessage(line, reference)])];
    if (found.length) return { codes: found.slice(0, MOST), nearest: [], ownLine, byMessage: true };
    const question = questionOf(line);
    const results = search(index, wordsToSearch(question, reference.synonyms));
    const failures = ranked(question, results.filter(({ ref }) => ref.startsWith("AMP")), reference);
    const known = failures.length > 0 && isAboutPrecision(question, failures, reference);
    const shown = (known ? failures : results).slice(0, MOST).map(({ ref }) => ref);
    return { codes: known ? shown : [], nearest: known ? [] : shown, ownLine, byMessage: false };
  }

  return { termsOf, stemsOf, search, explain, factsTogether };
})();

if (typeof module !== "undefined") module.exports = AmpExplain;
